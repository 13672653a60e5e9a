"""Norms as modules: their parameters, replicated over tp."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from triaxis.models.config import ModelConfig, NormKind
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import declare
from triaxis.parallel.places.layout import Init, replicated


class Norm(nn.Module):
    """A norm over the last `size` elements, its parameters replicated over tp.

    partial_gradient: each tensor rank sees other tokens (or other heads), so its gradient is summed over tp
    """

    def __init__(
        self, build: Build, name: str, size: int, *, kind: NormKind, epsilon: float, partial_gradient: bool
    ) -> None:
        super().__init__()
        self.size, self.epsilon, self.rms_norm = size, epsilon, build.kernels.rms_norm

        def parameter(suffix: str, init: Init) -> nn.Parameter:
            layout = replicated(
                f"{name}.{suffix}", (size,), build.mesh.tp.rank, sequence_parallel=partial_gradient, init=init
            )
            return declare(build.parameter(size), layout)

        self.weight = parameter("weight", Init.ONES)
        self.bias = parameter("bias", Init.ZEROS) if kind is NormKind.LAYERNORM else None

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(input, (self.size,), self.weight, self.bias, self.epsilon)
        return self.rms_norm(input, self.weight, self.epsilon)


def hidden_norm(model: ModelConfig, build: Build, name: str) -> Norm:
    """A norm over the hidden size, of the model's kind."""
    return Norm(
        build,
        name,
        model.hidden_size,
        kind=model.norm,
        epsilon=model.norm_eps,
        partial_gradient=build.sequence_parallel,
    )
