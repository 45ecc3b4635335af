"""The input and output end of a fused block or a linear layer, where tensor parallelism communicates.

A block maps rows of the residual stream [M, h] to rows. Tensor parallelism splits the features between its first and its last GEMM: each
rank computes the heads, or the part of the MLP, of its weight shards. So only the two ends differ from a block on one GPU (FP8-LM section
2.3, Figure 2; Korthikanti et al. 2022, section 4.2):

    forward   first GEMM's input    the norm's kernel casts this rank's rows -> all-gather in FP8 -> the GEMM's operand
              last GEMM's output    partial sums of all ranks are reduced -> this rank's rows
    backward  last GEMM's grad      cast this rank's rows -> all-gather in FP8 -> operand of both GEMMs
              first GEMM's input    cast again from the stream, gathered again -> transposed -> grad_weight's operand
              its grad_input        partial sums are cast to FP8, exchanged, summed in FP32 -> this rank's rows

A block calls `Ends` at its ends, `ALONE` on one GPU; `msamp.parallel` derives the one of a tensor-parallel group. Each collective starts as
soon as its input is ready and is waited for only when its result is needed, so that weight casts and GEMMs overlap with it. A GEMM next to
a collective is a `RowProduct`, whose rows may be computed in pieces: a rank's own rows while those of the others arrive, or the rows of the
others first, which are then sent while its own are computed.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from msamp.nn.gemm import LayerGemm, RowProduct


class PendingRows(Protocol):
    """Rows that a collective is still delivering."""

    def __call__(self) -> torch.Tensor:
        """Wait for the rows (on a GPU only the stream waits) and return them; they are valid until `done`."""

    def product(self, product: RowProduct) -> torch.Tensor:
        """Wait for the rows and return their product; rows that are there already may be multiplied before."""

    def keep(self) -> torch.Tensor:
        """Return the rows in separate memory, as saving them for backward requires; `done` then does nothing."""

    def done(self) -> None:
        """Release the rows: every kernel that reads them is in the current stream, and the next collective may overwrite their memory."""


class ReadyRows:
    """A `PendingRows` for a tensor that is already available, in separate memory."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __call__(self) -> torch.Tensor:
        return self._rows

    def product(self, product: RowProduct) -> torch.Tensor:
        return product.of(self._rows)

    def keep(self) -> torch.Tensor:
        return self._rows

    def done(self) -> None:
        pass


class Ends:
    """The communication at a block's ends: gathers of its rows and reductions of its partial sums. As it is, for one GPU, which has all
    rows and all sums.

    Attributes:
        ranks: number of ranks in the group.
        spread: whether a rank has only its own M / ranks rows of the stream (sequence parallelism).
        adds_bias: whether this rank adds the bias of the last GEMM to its partial sum; true on one rank of the group.
        keeps_gathered: save the gathered input for backward instead of gathering it again; only if `spread`.
    """

    ranks, spread, adds_bias, keeps_gathered = 1, False, True, False

    def shared_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the maximum of `amax` (FP32, 0-dim) over the ranks that gather their rows; `amax` itself if no rows are gathered."""
        return amax

    def start_gather(self, payload: torch.Tensor, label: str) -> PendingRows:
        """Gather [M, N] from every rank's [M / ranks, N] if `spread`; bytes are counted as `label`. The caller releases the rows by `done`
        before its forward or backward returns."""
        return ReadyRows(payload)

    def sum_output(self, product: RowProduct, codes: torch.Tensor, layer: LayerGemm) -> torch.Tensor:
        """Compute this rank's partial sums [M, N], the product of `codes` [M, K], and sum them over all ranks; return this rank's rows if
        `spread`."""
        return product.of(codes)

    def start_sum_grad(self, partial: torch.Tensor, layer: LayerGemm) -> Callable[[], torch.Tensor]:
        """Start the sum of the ranks' partial grad_inputs [M, K]; the returned function waits for the result, which may be `partial`
        itself, and returns this rank's rows if `spread`."""
        return lambda: partial


ALONE = Ends()
