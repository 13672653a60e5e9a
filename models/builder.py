"""Builds the part of a model that one pipeline stage holds.

Shapes: B rows, L tokens of a row, T = B·L tokens (T/tp under sequence parallelism), D hidden, V vocabulary,
P positions, E half of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from triaxis.models.auxiliary import with_auxiliary
from triaxis.models.batch import Batch, Inputs, Output, SequenceContext
from triaxis.models.config import ModelConfig
from triaxis.models.norm import hidden_norm
from triaxis.models.parts import build_part
from triaxis.models.positions import Learned, Rope
from triaxis.models.rotary import rotary_tables
from triaxis.models.stage import ModelStage
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import declare
from triaxis.parallel.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead
from triaxis.parallel.places.layout import Init, replicated
from triaxis.parallel.replicas.initialize import Fill, random_values

EMBEDDING_NAME = "model.embed_tokens"
HEAD_NAME = "lm_head"


class LearnedPositions(nn.Module):
    """A vector for each position, replicated over tp and added to this rank's tokens."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.group, self.sequence_parallel = build.mesh.tp, build.sequence_parallel
        shape = (config.max_positions, config.hidden_size)
        layout = replicated(
            "model.embed_positions.weight",
            shape,
            self.group.rank,
            sequence_parallel=self.sequence_parallel,
            decayed=True,
            init=Init.NORMAL,
            std=config.init_std,
        )
        self.weight = declare(build.parameter(*shape), layout)

    def forward(self, positions_T: Tensor) -> Tensor:
        if self.sequence_parallel:
            positions_T = positions_T.chunk(self.group.size)[self.group.rank]
        return F.embedding(positions_T, self.weight)


class Stage(ModelStage):
    """Consecutive layers, with the embedding on the first stage and the loss on the last."""

    cos_PE: Tensor | None
    sin_PE: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        layers: range,
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.config, self.hidden_size, self.recompute = config, config.hidden_size, build.recompute
        self.tokens_per_part = build.mesh.tp.size if build.sequence_parallel else 1
        kept_apart = config.tied and not (first and last)
        self.embedding = self.positions = self.norm = self.head = None
        if first:
            self.embedding = VocabParallelEmbedding(
                build,
                f"{EMBEDDING_NAME}.weight",
                config.vocab_size,
                config.hidden_size,
                tied=kept_apart,
                std=config.init_std,
            )
            if isinstance(config.positions, Learned):
                self.positions = LearnedPositions(config, build)
        self.blocks = nn.ModuleList(
            build_part(config.kind(layer), config, build, f"model.layers.{layer}") for layer in layers
        )
        if last:
            self.norm = hidden_norm(config, build, "model.norm")
            shared = self.embedding.weight if config.tied and self.embedding is not None else None
            self.head = VocabParallelHead(
                build,
                f"{EMBEDDING_NAME if config.tied else HEAD_NAME}.weight",
                config.vocab_size,
                config.hidden_size,
                weight=shared,
                tied=kept_apart,
                std=config.init_std,
            )
        cos_PE, sin_PE = _tables(config, build)
        self.register_buffer("cos_PE", cos_PE, persistent=False)
        self.register_buffer("sin_PE", sin_PE, persistent=False)

    def forward(self, hidden_TD: Tensor | None, inputs: Inputs) -> Output:
        """Hidden [T, D] for the next stage; on the last, the sum of the trained tokens' losses, scaled."""
        output_TD, auxiliary = self._hidden(hidden_TD, inputs)
        if self.head is None:
            return Output(hidden=output_TD, auxiliary=auxiliary)
        labels_T = inputs.batch.labels_BL.reshape(-1)
        return Output(loss=self.head(output_TD, labels_T, inputs.token_scale), auxiliary=auxiliary)

    def logits(self, hidden_TD: Tensor | None, batch: Batch) -> Tensor:
        """All logits [T, V] of the last stage, for inspection."""
        assert self.head is not None, "only the last stage has logits"
        unscaled = Inputs(batch=batch, token_scale=torch.ones(()), row_scale=1.0)
        return self.head.logits(self._hidden(hidden_TD, unscaled)[0])

    def units(self) -> tuple[type[nn.Module], ...]:
        """Layers of any kind, embedding and head."""
        blocks = dict.fromkeys(type(block) for block in self.blocks)
        return (*blocks, VocabParallelEmbedding, VocabParallelHead)

    def first_values(self, seed: int) -> Fill:
        return random_values(seed)

    def _hidden(self, hidden_TD: Tensor | None, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """The stage's last hidden state, normed on the last stage; the sum of its layers' auxiliary losses."""
        context = self._context(inputs)
        if self.embedding is not None:
            hidden_TD = self.embedding(inputs.batch.tokens_BL.reshape(-1))
            if self.positions is not None:
                hidden_TD = hidden_TD + self.positions(inputs.batch.positions_BL.reshape(-1))
        assert hidden_TD is not None, "a stage behind the first needs the hidden state of the one before it"
        losses: list[Tensor] = []
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                made = checkpoint(block, hidden_TD, context, use_reentrant=False, preserve_rng_state=False)
            else:
                made = block(hidden_TD, context)
            if isinstance(made, tuple):  # a layer with a loss of its own
                hidden_TD, loss = made
                made = with_auxiliary(hidden_TD, loss)
                losses.append(loss.detach())
            hidden_TD = made
        output_TD: Tensor = hidden_TD if self.norm is None else self.norm(hidden_TD)
        return output_TD, torch.stack(losses).sum() if losses else None

    def _context(self, inputs: Inputs) -> SequenceContext:
        rows, length = inputs.batch.tokens_BL.shape
        if length > self.config.max_positions:
            raise ValueError(
                f"`sequence_length` must be at most the {self.config.max_positions} positions of "
                f"{self.config.name}, but is {length}; shorten it, or set the model's `max_positions`"
            )
        if rows * length % self.tokens_per_part:
            raise ValueError(
                f"`tp` must divide the {rows * length} tokens of a microbatch under sequence parallelism, "
                f"but is {self.tokens_per_part}; change `sequence_length`, or turn sequence parallelism off"
            )
        cos_T1E = sin_T1E = None
        if self.cos_PE is not None and self.sin_PE is not None:
            positions_T = inputs.batch.positions_BL.reshape(-1)
            cos_T1E, sin_T1E = (x[positions_T].unsqueeze(1) for x in (self.cos_PE, self.sin_PE))
        return SequenceContext(inputs=inputs, cos_T1E=cos_T1E, sin_T1E=sin_T1E)


def _tables(config: ModelConfig, build: Build) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if not isinstance(config.positions, Rope) or config.rotary_size() == 0:
        return None, None
    return rotary_tables(
        config.max_positions,
        config.rotary_size(),
        config.positions,
        dtype=build.dtype,
        device=build.mesh.world.device,
    )


def build_model(
    config: ModelConfig, build: Build, *, layers: range | None = None, first: bool = True, last: bool = True
) -> Stage:
    """A stage with empty parameters: `layers` (all, if None), the embedding if first, norm and head if last."""
    for cut in config.cuts():
        if not cut.allows(build.mesh.tp.size):
            raise ValueError(
                f"`tp` must divide the {cut.blocks} {cut.what} of {config.name}, but is {build.mesh.tp.size}"
            )
    return Stage(config, build, range(config.layers) if layers is None else layers, first=first, last=last)
