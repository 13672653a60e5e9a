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
from triaxis.models.depths import Depth, DepthInput, later
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

    further_embedding: VocabParallelEmbedding | None
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
        kept_apart = (config.tied or config.depths > 0) and not (first and last)
        self.embedding = self.positions = self.norm = self.head = self.further_embedding = None
        if first:
            self.embedding = _embedding(config, build, tied=kept_apart)
            if isinstance(config.positions, Learned):
                self.positions = LearnedPositions(config, build)
        self.blocks = nn.ModuleList(
            build_part(config.kind(layer), config, build, f"model.layers.{layer}") for layer in layers
        )
        for block in self.blocks:
            build.kernels.prepare(block)
        if last:
            self.norm = hidden_norm(config, build, "model.norm")
            shared = self.embedding.weight if config.tied and self.embedding is not None else None
            self.head = VocabParallelHead(
                build,
                f"{EMBEDDING_NAME if config.tied else HEAD_NAME}.weight",
                config.vocab_size,
                config.hidden_size,
                weight=shared,
                tied=config.tied and kept_apart,
                counted=not (config.tied and kept_apart),
                std=config.init_std,
            )
        self.depths = nn.ModuleList()
        if last and config.depths:
            self._add_depths(config, build)
        cos_PE, sin_PE = _tables(config, build)
        self.register_buffer("cos_PE", cos_PE, persistent=False)
        self.register_buffer("sin_PE", sin_PE, persistent=False)

    def _add_depths(self, config: ModelConfig, build: Build) -> None:
        """Extra prediction depths, and the embedding that they read where this stage has none."""
        assert self.head is not None
        if self.embedding is None:
            shared = self.head.weight if config.tied else None
            self.further_embedding = _embedding(config, build, tied=True, counted=False, weight=shared)
        self.depths = nn.ModuleList(
            Depth(config, build, config.layers + depth) for depth in range(config.depths)
        )

    def forward(self, hidden_TD: Tensor | None, inputs: Inputs) -> Output:
        """Hidden [T, D] for the next stage; on the last, the sum of the trained tokens' losses, scaled."""
        context, auxiliary = self._context(inputs), list[Tensor]()
        hidden_TD = self._through_layers(hidden_TD, context, auxiliary)
        if self.head is None or self.norm is None:
            return Output(hidden=hidden_TD, auxiliary=_sum(auxiliary))
        loss = self.head(self.norm(hidden_TD), inputs.batch.labels_BL.reshape(-1), inputs.token_scale)
        further = None
        if self.depths and torch.is_grad_enabled():  # evaluation is of the model itself
            losses = torch.stack(self._predict_further(hidden_TD, context, auxiliary))
            loss = with_auxiliary(loss, losses.mean() * inputs.depth_weight)
            further = losses.detach()
        return Output(loss=loss, auxiliary=_sum(auxiliary), depths=further)

    def logits(self, hidden_TD: Tensor | None, batch: Batch) -> Tensor:
        """All logits [T, V] of the last stage, for inspection."""
        assert self.head is not None, "only the last stage has logits"
        unscaled = Inputs(batch=batch, token_scale=torch.ones(()), row_scale=1.0)
        assert self.norm is not None
        return self.head.logits(self.norm(self._through_layers(hidden_TD, self._context(unscaled), [])))

    def units(self) -> tuple[type[nn.Module], ...]:
        """Layers of any kind, embedding and head, and what joins an extra prediction depth to them."""
        layers = (*self.blocks, *(depth.block for depth in self.depths))
        blocks = dict.fromkeys(type(block) for block in layers)
        return (*blocks, DepthInput, VocabParallelEmbedding, VocabParallelHead)

    def first_values(self, seed: int) -> Fill:
        return random_values(seed)

    def _through_layers(
        self, hidden_TD: Tensor | None, context: SequenceContext, losses: list[Tensor]
    ) -> Tensor:
        """The last layer's hidden state, before the final norm. losses: takes those of layers with one of their own."""
        batch = context.inputs.batch
        if self.embedding is not None:
            hidden_TD = self.embedding(batch.tokens_BL.reshape(-1))
            if self.positions is not None:
                hidden_TD = hidden_TD + self.positions(batch.positions_BL.reshape(-1))
        assert hidden_TD is not None, "a stage behind the first needs the hidden state of the one before it"
        for block in self.blocks:
            hidden_TD = self._through(block, hidden_TD, context, losses)
        return hidden_TD

    def _through(
        self, block: nn.Module, hidden_TD: Tensor, context: SequenceContext, losses: list[Tensor]
    ) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            made = checkpoint(block, hidden_TD, context, use_reentrant=False, preserve_rng_state=False)
        else:
            made = block(hidden_TD, context)
        if isinstance(made, tuple):  # a layer with a loss of its own
            hidden_TD, loss = made
            made = with_auxiliary(hidden_TD, loss)
            losses.append(loss.detach())
        output_TD: Tensor = made
        return output_TD

    def _predict_further(
        self, hidden_TD: Tensor, context: SequenceContext, auxiliary: list[Tensor]
    ) -> list[Tensor]:
        """The scaled loss of each extra prediction depth; its denominator is the main loss's."""
        inputs = context.inputs
        embedding = self.further_embedding if self.embedding is None else self.embedding
        assert embedding is not None and self.head is not None
        losses = []
        for number, depth in enumerate(self.depths, start=1):
            assert isinstance(depth, Depth)
            ids_T, labels_T = later(inputs.batch, number)
            hidden_TD = self._through(
                depth.block, depth.input(embedding(ids_T), hidden_TD), context, auxiliary
            )
            losses.append(self.head(depth.norm(hidden_TD), labels_T, inputs.token_scale))
        return losses

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


def _embedding(
    config: ModelConfig,
    build: Build,
    *,
    tied: bool,
    counted: bool = True,
    weight: nn.Parameter | None = None,
) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(
        build,
        f"{EMBEDDING_NAME}.weight",
        config.vocab_size,
        config.hidden_size,
        weight=weight,
        tied=tied,
        counted=counted,
        std=config.init_std,
    )


def _sum(losses: list[Tensor]) -> Tensor | None:
    return torch.stack(losses).sum() if losses else None


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
