"""Column- and row-parallel FP8 linear layers: their activations travel in FP8 in both directions (FP8-LM section 2.3, Figure 2).

What: T ranks share one linear layer of K inputs and N outputs. With sequence parallelism each rank holds n / T of the n tokens between
the layers. A column-parallel layer cuts W along its outputs, and a row-parallel layer along its inputs:

    column, W_i [N / T, K]    forward     x_i [n / T, K] -> q(x_i) E4M3 -> all-gather: q(x) [n, K] -> y_i = q(x) W_i^T [n, N / T]
                              backward    dx_i = q(g_i) W_i [n, K] -> E5M2 -> reduce-scatter in FP32 -> dx [n / T, K]
                                          dW_i = q(g_i)^T q(x) [N / T, K]
    row, W_i [N, K / T]       forward     x_i [n, K / T] -> q(x_i) E4M3 -> y_i = q(x_i) W_i^T [n, N] -> reduce-scatter -> y [n / T, N]
                              backward    g [n / T, N] -> q(g) E5M2 -> all-gather [n, N] -> dx_i = q(g) W_i [n, K / T]
                                          dW_i = q(g)^T q(x_i) [N, K / T]

Without sequence parallelism nothing is gathered, and an all-reduce takes the place of each reduce-scatter.

Why FP8 here: each half of a transformer layer moves its activations twice in forward and twice in backward. A payload of one byte halves
what BF16 moves. For n tokens of width h under sequence parallelism each rank sends, in bytes:

    gather of the input          (T - 1) / T n h      E4M3; again in backward where a rank keeps its shard alone
    sum of the output            (T - 1) / T 2 n h    BF16, or half of it with wire "fp8"
    gather of the grad_output    (T - 1) / T n h      E5M2
    sum of grad_input            (T - 1) / T n h      E5M2

How the sum is taken: each rank casts its part with the shared scale and sends every other rank the slice that this one owns. The owner
adds the T payloads in FP32, in rank order. A sum in FP8 at each hop would round T - 1 times.

Scales: a tensor is cast first and gathered once, and the gathered payload is the GEMM's operand as it is. So each tensor that travels has
one scale on all ranks of the group. With delayed scaling that costs nothing, since the histories are rolled over the group. Just in time
it costs an all-reduce of one number for each cast. The partial sums have a row of their own in the layer's `LinearScaling`. A weight has
one scale on each rank, since no weight travels here.

Kept for backward: by default the rank's own E4M3 shard of a column layer's input, [n / T, K], which is gathered again while grad_input's
GEMM runs. `saved_input="gathered"` keeps [n, K]: no second gather, and T times the memory.

A value that is not finite makes the results of its own rank NaN, and may not show on the others. The gradients' norm is combined over the
group before anything is decided by it.

What was tried, with the times in `tools/bench/LOG.md`:

- The output's sum in FP8 (`--tp-wire fp8`) halves its bytes and gains about 1 % of a step at 1.3B: collectives of this size wait more than
  they move. BF16 is the default.
- One kernel that adds the E5M2 parts up, 16 us where torch took five; and a norm's kernel that leaves the FP8 shard, so that no cast stands
  before the gather. Both made the step faster.
- A GEMM cut into chunks with NCCL beside it lost to GEMM and NCCL in turn: NCCL takes multiprocessors. Copies through memory that the
  ranks share take none (`msamp.comm.copies`).
- Without sequence parallelism, a step at O3 cannot be captured as a CUDA graph.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from msamp.comm.copies import TRANSPORTS, choose_peers
from msamp.comm.counters import WireBytes
from msamp.nn.ends import PendingRows, ReadyRows
from msamp.nn.gemm import LayerGemm
from msamp.nn.linear_fn import LinearFunction, LinearSettings, activation
from msamp.nn.scaling_state import WIRE, LinearScaling
from msamp.numerics.formats import Format
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.sequence_parallel import shared_amax, start_gather, start_sum

WIRES = ("bf16", "fp8")
SAVED_INPUTS = ("shard", "gathered")


class TensorParallel:
    """What the FP8 linear layers of one tensor-parallel group share; and the ends (`msamp.nn.ends`) of the fused blocks that hold them.

    Args:
        group: the ranks.
        sequence_parallel: dim 0 of the activations outside (column layers' input, row layers' output) is spread over the ranks.
        wire: how the sum of a row-parallel layer's output travels in forward: "bf16" (the dtype of the activations, which
            may be FP32) or "fp8".
        saved_input: what a column-parallel layer keeps of its FP8 input under sequence parallelism: "shard", gathered again
            in backward while grad_input's GEMM runs, or "gathered", ranks times as large.
        sent: where bytes are counted, as kind "activation"; None is a counter of its own.
        transport: "nccl", the group's own collectives whatever its backend is; "copies", into the peers' memory (`msamp.comm.copies`); or
            "auto", the faster of both where there can be copies. Collective unless it is "nccl".
        measure: whether "auto" may measure; else it takes copies where there can be any, so that bits do not depend on times.

    Attributes:
        travels: how, and why so, in words for a log.

    Raises:
        ValueError: another `wire`, `saved_input` or `transport`, or copies between ranks that cannot make any.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool,
        wire: str = "bf16",
        saved_input: str = "shard",
        sent: WireBytes | None = None,
        transport: str = "nccl",
        measure: bool = True,
    ) -> None:
        chosen = (("wire", wire, WIRES), ("saved_input", saved_input, SAVED_INPUTS), ("transport", transport, TRANSPORTS))
        for name, value, legal in chosen:
            if value not in legal:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(legal)}")
        self.sequence_parallel = sequence_parallel
        self.wire = wire
        self.saved_input = saved_input
        self.sent = WireBytes() if sent is None else sent
        self.peers, self.travels = choose_peers(group, self.sent, transport, measure=measure)
        # As `Ends`. The first rank of a block adds the bias of the last layer to its partial sum, in that GEMM: no kernel of its own.
        self.ranks, self.spread, self.adds_bias = self.peers.ranks, sequence_parallel, self.peers.rank == 0
        self.keeps_gathered = sequence_parallel and saved_input == "gathered"

    def shared_amax(self, amax: torch.Tensor) -> torch.Tensor:
        """The largest amax of the group; what a rank gives is alike, or not sent, without sequence parallelism."""
        return shared_amax(amax, self.peers) if self.sequence_parallel else amax

    def start_gather(self, payload: torch.Tensor, label: str) -> PendingRows:
        """All ranks' rows, under sequence parallelism; else `payload`."""
        return start_gather(payload, self.peers, label) if self.sequence_parallel else ReadyRows(payload)

    def sum_output(self, partial: torch.Tensor, layer: LayerGemm) -> torch.Tensor:
        """The sum of a row-parallel layer's output, sent as `wire` says."""
        wire = (layer.sums, layer.gemm.input) if self.wire == "fp8" else None
        return start_sum(partial, self.peers, "output", scatter=self.sequence_parallel, wire=wire)()

    def start_sum_grad(self, partial: torch.Tensor, layer: LayerGemm) -> Callable[[], torch.Tensor]:
        """The sum of a column-parallel layer's grad_input, sent in FP8."""
        wire = (layer.sums, layer.gemm.grad_output)
        return start_sum(partial, self.peers, "grad_input", scatter=self.sequence_parallel, wire=wire)


def column_linear(
    x: torch.Tensor, weight: ScalingTensor, bias: torch.Tensor | None, scaling: LinearScaling, tp: TensorParallel
) -> torch.Tensor:
    """FP8 linear with output features spread over the ranks.

    Args:
        x: BF16, FP16 or FP32, under autocast taken in the autocast dtype. [s / ranks, ..., K] with sequence parallelism, the
            same s on every rank; else [s, ..., K], the same values on every rank.
        weight: [N / ranks, K] FP16-scaled or E4M3, with a scale of its own.
        bias: [N / ranks] or None.
        scaling: of the layer, with a row for the partial sums of grad_input (`wire` E5M2).
        tp: the group.

    Returns:
        [s, ..., N / ranks] in the dtype of `x`.

    Raises:
        ValueError: a shape that does not fit, an input dtype that is none of these, or a `scaling` without the third row.
    """
    x = _prepare(x, weight, scaling, scaling.gemm.grad_output.format)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; this weight shard takes ({weight.shape[0]},)")
    return LinearFunction.apply(x, weight, bias, LinearSettings(LayerGemm.of(scaling, weight), input_end=tp))


def row_linear(x: torch.Tensor, weight: ScalingTensor, scaling: LinearScaling, tp: TensorParallel) -> torch.Tensor:
    """FP8 linear with input features spread over the ranks; a bias is added to its result.

    Args:
        x: [s, ..., K / ranks] BF16, FP16 or FP32, under autocast taken in the autocast dtype.
        weight: [N, K / ranks] FP16-scaled or E4M3, with a scale of its own.
        scaling: of the layer, for `tp.wire` "fp8" with a row for the partial sums of the output (`wire` E4M3).
        tp: the group.

    Returns:
        [s / ranks, ..., N] with sequence parallelism, else [s, ..., N], the same on every rank; in the dtype of `x`.

    Raises:
        ValueError: as `column_linear`; also, under sequence parallelism, an s that is no multiple of the ranks.
    """
    x = _prepare(x, weight, scaling, scaling.gemm.input.format if tp.wire == "fp8" else None)
    ranks = tp.peers.ranks
    if tp.sequence_parallel and x.shape[0] % ranks:
        raise ValueError(
            f"sequence length {x.shape[0]} is no multiple of the {ranks} ranks that sequence parallelism spreads it over; "
            f"use {-(-x.shape[0] // ranks) * ranks}, or turn sequence parallelism off"
        )
    return LinearFunction.apply(x, weight, None, LinearSettings(LayerGemm.of(scaling, weight), output_end=tp))


def _prepare(x: torch.Tensor, weight: ScalingTensor, scaling: LinearScaling, wire: Format | None) -> torch.Tensor:
    """The checked input in its dtype; `wire` is the format that the layer's partial sums need a scale for."""
    if x.dim() < 2:
        raise ValueError(f"input has shape {tuple(x.shape)}; it must be [sequence, ..., features]")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight shard has shape {tuple(weight.shape)}; an input of {x.shape[-1]} features takes (N, {x.shape[-1]})")
    if wire is not None and scaling.formats[WIRE:] != (wire,):
        raise ValueError(f"the layer has no scale for partial sums in {wire}; make its LinearScaling with wire={wire}")
    return activation(x)
