"""The two ends of a fused block or a linear layer, where tensor parallelism enters it.

A block takes rows of the residual stream [M, h] and gives rows back. Tensor parallelism splits the features between its first and its last
GEMM: each rank has the heads, or the part of the MLP, that belong to its shards of the weights. So only the ends differ from a block on one
GPU (FP8-LM section 2.3, Figure 2; Korthikanti et al. 2022, section 4.2):

    forward   first GEMM's input    cast by the norm's kernel on this rank's rows -> FP8 rows gathered -> the GEMM's operand
              last GEMM's output    partial sums of all ranks added up -> this rank's rows
    backward  last GEMM's grad      cast on this rank's rows -> FP8 rows gathered -> both GEMMs' operand
              first GEMM's input    cast again from the stream, gathered again -> transposed -> grad_weight's operand
              its grad_input        partial sums cast to FP8, exchanged, added up in FP32 -> this rank's rows

`Ends` is the interface that a block calls there. `ALONE` is a block on one GPU: nothing is gathered and nothing added. `msamp.parallel` has
the implementation for a tensor-parallel group. A collective starts as soon as its input is there and is waited for where its result is
needed, so that casts of weights and GEMMs run beside it.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from msamp.nn.gemm import LayerGemm


class PendingRows(Protocol):
    """Rows on their way. `rows()` waits for them, on a GPU in the stream alone."""

    def __call__(self) -> torch.Tensor:
        """The rows, valid until `done`."""

    def keep(self) -> torch.Tensor:
        """The rows in memory of their own, as what is kept for backward must be; `done` does nothing then."""

    def done(self) -> None:
        """The current stream has every kernel that reads the rows: the next collective may write their memory."""


class ReadyRows:
    """Rows that are there already, in memory of their own: a `PendingRows` of a tensor."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __call__(self) -> torch.Tensor:
        return self._rows

    def keep(self) -> torch.Tensor:
        return self._rows

    def done(self) -> None:
        pass


class Ends(Protocol):
    """Where a block's rows come from, and where its partial sums go.

    Attributes:
        ranks: of the group.
        spread: whether a rank has only its own rows of the stream, M / ranks of them (sequence parallelism).
        adds_bias: whether the bias of the last GEMM enters this rank's partial sum; true on one rank of the group.
        keeps_gathered: keep the gathered input for backward instead of gathering it again; only where `spread`.
    """

    ranks: int
    spread: bool
    adds_bias: bool
    keeps_gathered: bool

    def shared_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """The largest amax (FP32, 0-dim) of the ranks that gather their rows, for one scale; `amax` itself where no rows are gathered."""

    def start_gather(self, payload: torch.Tensor, label: str) -> PendingRows:
        """All ranks' rows [M, N] of this rank's [M / ranks, N], where `spread`; bytes are counted as `label`. The caller gives them back by
        `done` before it returns: no gathered rows outlive the forward or backward of a layer."""

    def sum_output(self, partial: torch.Tensor, layer: LayerGemm) -> torch.Tensor:
        """The sum of the ranks' partial sums [M, N], of which this rank gets its rows where `spread`; may be `partial` itself."""

    def start_sum_grad(self, partial: torch.Tensor, layer: LayerGemm) -> Callable[[], torch.Tensor]:
        """As `sum_output`, for a grad_input; what is returned waits for it."""


class _Alone:
    """One GPU has all rows and all sums."""

    ranks, spread, adds_bias, keeps_gathered = 1, False, True, False

    def shared_amax(self, amax: torch.Tensor) -> torch.Tensor:
        return amax

    def start_gather(self, payload: torch.Tensor, label: str) -> PendingRows:
        return ReadyRows(payload)

    def sum_output(self, partial: torch.Tensor, layer: LayerGemm) -> torch.Tensor:
        return partial

    def start_sum_grad(self, partial: torch.Tensor, layer: LayerGemm) -> Callable[[], torch.Tensor]:
        return lambda: partial


ALONE: Ends = _Alone()
