"""Where the machines of a run meet: an address known from the start, which no pickles reach. For torch's agent."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from triaxis.parallel.worlds.meeting import Address, open_store

NAME = "triaxis"


class NodeMeeting(RendezvousHandler):
    """Machine 0 opens the store on the interface that the address names; the ranks use it too."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
        self._run_id, self._size = parameters.run_id, parameters.max_nodes
        self._rank = int(parameters.config["rank"])
        self._seconds = float(parameters.config["timeout"])
        self._address = Address(host=host, port=port, one_machine=self._size == 1)
        self._store: Any = None

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = open_store(self._address, self._rank, self._seconds)
        info = RendezvousStoreInfo(self._address.host, self._address.port)
        return RendezvousInfo(self._store, self._rank, self._size, info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody comes later."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Makes torch's agent know this meeting by its name."""
    rendezvous_handler_registry.register(NAME, NodeMeeting)
