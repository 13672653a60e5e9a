"""What the engine asks of a stage, whoever builds it: the engine's own builder, or `transformers`."""

from __future__ import annotations

from abc import abstractmethod
from importlib import import_module

import torch
from torch import Tensor, nn

from triaxis.models.batch import Batch, Inputs, Output
from triaxis.models.config import ModelConfig
from triaxis.parallel.layers.build import Build
from triaxis.parallel.replicas.initialize import Fill


class ModelStage(nn.Module):
    """The part of a model that one pipeline stage holds; every parameter and state declares its layout."""

    config: ModelConfig

    @abstractmethod
    def forward(self, hidden_TD: Tensor | None, inputs: Inputs) -> Output:
        """Hidden [T, D] for the next stage; on the last, the sum of the trained tokens' losses, scaled."""

    @abstractmethod
    def logits(self, hidden_TD: Tensor | None, batch: Batch) -> Tensor:
        """All logits [T, V] of the last stage, for inspection."""

    @abstractmethod
    def units(self) -> tuple[type[nn.Module], ...]:
        """The modules whose parameters are gathered and reduced together, unless a run names others."""

    @abstractmethod
    def first_values(self, seed: int) -> Fill:
        """The values that parameters begin with, as a function of the seed and their names."""

    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.parameters()).device


def build_stage(
    config: ModelConfig, build: Build, *, layers: range | None = None, first: bool = True, last: bool = True
) -> ModelStage:
    """A stage of any model with empty parameters, built by what its configuration names (`stage`)."""
    path, _, attribute = config.stage.partition(":")
    made: ModelStage = getattr(import_module(path), attribute)(
        config, build, layers=layers, first=first, last=last
    )
    return made
