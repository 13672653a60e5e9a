"""What every layer is built with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from triaxis.parallel.kernels.kernels import Kernels, kernels_for
from triaxis.parallel.worlds.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Where and how a model is built: one argument of all its layers.

    sequence_parallel: outside the tensor-parallel layers each tensor rank holds a part of the tokens
    dtype: of parameters and hidden states
    recompute: keep only each layer's input, and run the layer again in backward
    kernels: the functions that do the arithmetic
    """

    mesh: Mesh
    kernels: Kernels
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute: bool = False

    @classmethod
    def on(
        cls,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
        recompute: bool = False,
    ) -> Build:
        """With the kernels for the mesh's device."""
        return cls(
            mesh=mesh,
            kernels=kernels_for(mesh.world.device, dtype),
            dtype=dtype,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
        )

    def parameter(self, *shape: int) -> nn.Parameter:
        """An empty parameter on the mesh's device."""
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=self.mesh.world.device))
