"""What every layer is built with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from triaxis.parallel.kernels.kernels import Kernels, kernels_for
from triaxis.parallel.kernels.table import Operation
from triaxis.parallel.worlds.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Where and how a model is built: one argument of all its layers.

    sequence_parallel: outside the tensor-parallel layers each tensor rank holds a part of the tokens
    dtype: of parameters and hidden states
    recompute: keep only each layer's input, and run the layer again in backward
    kernels: the functions that do the arithmetic
    turns: the first and the last stage are chunks of one rank
    sized_only: parameters have shapes but no memory, which whoever shards them gives to each rank's part alone
    """

    mesh: Mesh
    kernels: Kernels
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    recompute: bool = False
    sized_only: bool = False
    turns: bool = False

    @classmethod
    def on(
        cls,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
        recompute: bool = False,
        sized_only: bool = False,
        turns: bool = False,
        kernels: Mapping[Operation, str] | None = None,
    ) -> Build:
        """With the kernels for the mesh's device: torch's, but for those that are asked for."""
        return cls(
            mesh=mesh,
            kernels=kernels_for(torch.device(mesh.world.target), dtype, kernels),
            dtype=dtype,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
            sized_only=sized_only,
            turns=turns,
        )

    def parameter(self, *shape: int) -> nn.Parameter:
        """An empty parameter on the mesh's device; on "meta" if it is to be `sized_only`."""
        device = torch.device("meta") if self.sized_only else self.mesh.world.device
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=device))
