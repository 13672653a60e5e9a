"""The module of a guest, as `transformers` makes it, without memory for its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triaxis.models.huggingface.families import FAMILIES
from triaxis.models.huggingface.guest import GuestModel, dropouts


class _EmptyOnMeta(TorchFunctionMode):
    """What is made empty, as parameters are, gets no memory; buffers, which are made of values, do.

    A mode belongs to its thread, where the default device of modules that are made elsewhere stays what it is.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        given = dict(kwargs or {})
        if func is torch.empty:
            given["device"] = "meta"
        return func(*args, **given)


def guest_module(model: GuestModel, *, with_dropout: bool = False) -> Any:  # noqa: ANN401 - transformers is untyped
    """The `PreTrainedModel` of a guest, its parameters on "meta" and its buffers on the host.

    with_dropout: as config.json says, for the file that is written; in training there is none
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING  # seconds

    if model.model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"`model_type` must be one of the engine's families ({', '.join(FAMILIES)}) or one that transformers "
            f"knows, but is {model.model_type!r}; install a version that has it (code from a model's folder is not run)"
        )
    values = model.values()
    config = CONFIG_MAPPING[model.model_type].from_dict(
        values if with_dropout else values | dict.fromkeys(dropouts(values), 0.0)
    )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"`model_type` must be that of a model that continues text, but transformers has no {model.model_type} "
            "for that (AutoModelForCausalLM)"
        )
    with _EmptyOnMeta():
        made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    without_memory = [name for name, buffer in made.named_buffers() if buffer.device.type == "meta"]
    if without_memory:
        raise ValueError(
            f"`model_type` must be that of a model whose buffers are made of values, but {', '.join(without_memory)} "
            f"of {model.model_type} {'is' if len(without_memory) == 1 else 'are'} made empty"
        )
    give_parameters(made, lambda _, held: torch.empty_like(held, device="meta"))
    return made


def give_parameters(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
    """Puts other parameters in the place of a module's, by name; what was tied stays so."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, held in module.named_parameters():
        made[held] = nn.Parameter(make(name, held.detach()), requires_grad=held.requires_grad)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = made[parameter]


@contextmanager
def without_bars() -> Iterator[None]:
    """Lets `transformers` read and write without progress bars between a run's own lines."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@lru_cache(maxsize=8)
def count_parameters(model: GuestModel) -> int:
    """All parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in guest_module(model).parameters())
