"""One microbatch: what the model reads and what it is trained to say.

Shape suffixes: B rows of the microbatch, L tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triaxis.parallel.kernels.attention import Documents

IGNORED = -100  # the label of a position that is not trained; cross_entropy's default ignore_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A microbatch of one data-parallel rank.

    tokens_BL: token ids
    labels_BL: the target at each position (already shifted), or IGNORED
    positions_BL: position within its document, from the row's start where the document began earlier
    documents: where they begin; None where no row has two, so that attention over whole rows is right
    Example: documents "ab" and "cde" in one row of length 5 give borders 0 2 5, positions 0 1 0 1 2
    and labels b IGNORED d e IGNORED.
    """

    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor
    documents: Documents | None

    def trained_tokens(self) -> int:
        """The positions that have a loss. Of a batch on the host: no device is waited for."""
        return int(np.count_nonzero(self.labels_BL.numpy() != IGNORED))

    def to(self, device: torch.device) -> Batch:
        return Batch(
            tokens_BL=self.tokens_BL.to(device, non_blocking=True),
            labels_BL=self.labels_BL.to(device, non_blocking=True),
            positions_BL=self.positions_BL.to(device, non_blocking=True),
            documents=None if self.documents is None else self.documents.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A microbatch as a stage reads it, with what its losses are multiplied by.

    batch: on the stage's device
    token_scale: of losses that are sums over trained tokens: one over those of the global batch (a scalar tensor)
    microbatch: its number in the step
    row_scale: of losses that are sums over rows: one over those of the global batch
    depth_weight: of the mean of the losses of extra prediction depths
    """

    batch: Batch
    token_scale: Tensor
    row_scale: float
    microbatch: int = 0
    depth_weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceContext:
    """What every layer of a stage needs to know of a microbatch, made once.

    cos_T1E, sin_T1E: the tokens' rotary tables, E half of what is turned of a head; None without rotary positions
    """

    inputs: Inputs
    cos_T1E: Tensor | None
    sin_T1E: Tensor | None


class Output(NamedTuple):
    """What a stage makes of a microbatch; a tuple, in which hooks on modules (ZeRO's, FSDP's) find the tensors.

    hidden: for the next stage; loss: on the last, the sum of the trained tokens' losses × token_scale
    auxiliary: the sum of the losses of the stage's own layers, scaled; its gradient flows already when that of the
        stage's output does (see `with_auxiliary`); None where no layer has one
    depths: on the last, each extra prediction depth's sum of losses × token_scale, without a gradient: it is trained
        with `loss` in the same way; None without such depths, and where nothing is trained
    """

    hidden: Tensor | None = None
    loss: Tensor | None = None
    auxiliary: Tensor | None = None
    depths: Tensor | None = None

    def passed_on(self) -> Tensor:
        """What the pipeline takes: the hidden state, or the loss."""
        passed = self.loss if self.hidden is None else self.hidden
        assert passed is not None, "a stage makes a hidden state or a loss"
        return passed
