"""A guest as the engine's one stage: its own layers between the engine's batches and the engine's loss.

    tokens ─ backbone (their layers, with their hooks) ─ hidden ─ head (what is left of their model) ─ chunks of logits

The model is taken apart once: the backbone is its `base_model`, and in the backbone's place the rest has a part that
hands on what it is given. So scalings, caps and biases of their head are theirs, whatever they are.
Shapes: B rows, L tokens of a row, T = B·L tokens, C of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from triaxis.models.batch import Batch, Inputs, Output
from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.guest import GuestModel
from triaxis.models.huggingface.guest_module import give_parameters, guest_module
from triaxis.models.huggingface.head_loss import head_loss
from triaxis.models.stage import ModelStage
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import declare, declare_state
from triaxis.parallel.places.layout import replicated
from triaxis.parallel.replicas.initialize import Fill


class _GivenHidden(nn.Module):
    """Stands where the backbone was and returns the hidden state that it is given."""

    def __init__(self) -> None:
        super().__init__()
        # Some heads ask a part of the backbone (`model.decoder`). Past nn.Module's own: it is no child of itself.
        object.__setattr__(self, "decoder", self)

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> Any:  # noqa: ANN401
        from transformers.modeling_outputs import (
            MoeModelOutputWithPast,  # has the fields that any head asks for
        )

        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class _Head(nn.Module):
    """hidden [C, D] → logits [C, V], as their model makes them."""

    def __init__(self, rest: nn.Module) -> None:
        super().__init__()
        self.rest = rest

    def forward(self, hidden_CD: Tensor) -> Tensor:
        logits: Tensor = self.rest(inputs_embeds=hidden_CD[None], use_cache=False).logits
        return logits[0]


class GuestStage(ModelStage):
    """A whole guest, whose parameters every tensor rank would hold whole: tp, pp and sp are 1."""

    def __init__(
        self, config: ModelConfig, build: Build, *, layers: range | None, first: bool, last: bool
    ) -> None:
        super().__init__()
        assert isinstance(config, GuestModel)
        if build.mesh.tp.size > 1 or not (first and last):
            raise ValueError(
                f"`tp` and `pp` must be 1 for {config.name}, which transformers builds whole; use dp, and ZeRO-3"
            )
        self.config, self._guest = config, config
        theirs = guest_module(config)
        device = torch.device("meta") if build.sized_only else build.mesh.world.device
        give_parameters(theirs, lambda _, held: torch.empty_like(held, dtype=build.dtype, device=device))
        _declare(theirs, config)
        _move_buffers(theirs, build.mesh.world.device)
        if build.recompute:
            _recompute_layers(theirs)
        self._layer_names = frozenset(theirs._no_split_modules or ())
        prefix, self.backbone = theirs.base_model_prefix, theirs.base_model
        if self.backbone is theirs:
            raise ValueError(
                f"`model_type` must be that of a model with a head of its own, but {config.model_type} has none"
            )
        setattr(theirs, prefix, _GivenHidden())
        self.head = _Head(theirs)
        self._takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters

    def forward(self, hidden_TD: Tensor | None, inputs: Inputs) -> Output:
        labels_T = inputs.batch.labels_BL.reshape(-1)
        hidden = self._hidden(inputs.batch)
        return Output(loss=head_loss(self.head, hidden, labels_T, inputs.token_scale, self.config.vocab_size))

    @torch.no_grad()
    def logits(self, hidden_TD: Tensor | None, batch: Batch) -> Tensor:
        return cast(Tensor, self.head(self._hidden(batch)))

    def _hidden(self, batch: Batch) -> Tensor:
        """[T, D]. Positions that begin anew within a row tell their model where another document begins."""
        told: dict[str, Tensor] = {"position_ids": batch.positions_BL} if self._takes_positions else {}
        made = self.backbone(input_ids=batch.tokens_BL, use_cache=False, **told)
        hidden: Tensor = made.last_hidden_state
        return hidden.flatten(0, 1)

    def units(self) -> tuple[type[nn.Module], ...]:
        """The layers that their model must not be split within."""
        return tuple(dict.fromkeys(type(part) for part in self._layers()))

    def _layers(self) -> Iterator[nn.Module]:
        return (part for part in self.modules() if type(part).__name__ in self._layer_names)

    def first_values(self, seed: int) -> Fill:
        from triaxis.models.huggingface.guest_weights import TheirFirstValues
        from triaxis.models.weights import filler

        return filler(TheirFirstValues(self._guest, seed))


def _declare(theirs: nn.Module, config: GuestModel) -> None:
    """Layouts of all parameters and of all states that their files hold, by their names."""
    for name, parameter in theirs.named_parameters():
        fault = (
            "is one number" if parameter.dim() == 0 else "" if parameter.requires_grad else "is not trained"
        )
        if fault:
            raise ValueError(
                f"every parameter of {config.name} must be a trained tensor of one dimension at least, to be cut over "
                f"dp, but `{name}` {fault}"
            )
        declare(parameter, replicated(name, parameter.shape, 0, decayed=parameter.dim() > 1))
    for name, buffer in theirs.named_buffers():
        owner = theirs.get_submodule(name.rpartition(".")[0])
        kept = name.rpartition(".")[2] not in owner._non_persistent_buffers_set
        if kept and buffer.is_floating_point() and buffer.dim():
            declare_state(buffer, replicated(name, buffer.shape, 0))


def _recompute_layers(theirs: Any) -> None:  # noqa: ANN401
    """Lets each of their layers keep its input alone; the switch has two names, by version."""
    kept = {"use_reentrant": False, "preserve_rng_state": False}
    if hasattr(theirs, "activation_checkpointing_enable"):
        theirs.activation_checkpointing_enable(activation_checkpointing_kwargs=kept)
    else:
        theirs.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kept)


def _move_buffers(theirs: nn.Module, device: torch.device) -> None:
    """Their tables, on the device that computes; what they declare goes along."""
    for part in theirs.modules():
        for name, held in part._buffers.items():
            if held is not None and held.device != device:
                moved = held.to(device)
                moved.__dict__.update(held.__dict__)
                part._buffers[name] = moved
