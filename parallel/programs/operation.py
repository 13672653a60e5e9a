"""The names of what ranks ask of each other. Pure."""

from __future__ import annotations

from enum import StrEnum


class Operation(StrEnum):
    """One kind of communication."""

    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_LARGEST = "all_reduce largest"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    RECEIVE = "receive"
    BARRIER = "barrier"
    NEW_GROUP = "new_group"

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks; the others are collectives."""
        return self in _MESSAGES


_MESSAGES = frozenset({Operation.SEND, Operation.RECEIVE})
OPPOSITE = {Operation.SEND: Operation.RECEIVE, Operation.RECEIVE: Operation.SEND}
