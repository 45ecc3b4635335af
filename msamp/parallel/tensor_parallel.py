"""Column- and row-parallel FP8 linear layers, with FP8 activations on the wire in both directions (FP8-LM section 2.3, Figure 2).

T ranks share one linear layer of K inputs and N outputs. With sequence parallelism each rank holds n / T of the n tokens between layers. A
column-parallel layer splits W along its outputs, and a row-parallel layer along its inputs:

    column, W_i [N / T, K]    forward     x_i [n / T, K] -> q(x_i) E4M3 -> all-gather: q(x) [n, K] -> y_i = q(x) W_i^T [n, N / T]
                              backward    dx_i = q(g_i) W_i [n, K] -> E5M2 -> reduce-scatter in FP32 -> dx [n / T, K]
                                          dW_i = q(g_i)^T q(x) [N / T, K]
    row, W_i [N, K / T]       forward     x_i [n, K / T] -> q(x_i) E4M3 -> y_i = q(x_i) W_i^T [n, N] -> reduce-scatter -> y [n / T, N]
                              backward    g [n / T, N] -> q(g) E5M2 -> all-gather [n, N] -> dx_i = q(g) W_i [n, K / T]
                                          dW_i = q(g)^T q(x_i) [N, K / T]

Without sequence parallelism nothing is gathered, and an all-reduce replaces each reduce-scatter.

Each half of a transformer layer communicates its activations twice in forward and twice in backward, and FP8 halves the bytes of BF16. For
n tokens of width h under sequence parallelism, each rank sends:

    all-gather of the input          (T - 1) / T n h bytes      E4M3; again in backward if only the shard was saved
    reduce-scatter of the output     (T - 1) / T 2 n h          BF16; half of it with `wire="fp8"`
    all-gather of the grad_output    (T - 1) / T n h            E5M2
    reduce-scatter of grad_input     (T - 1) / T n h            E5M2; twice of it with `grad_wire="bf16"` (O1 and O2)

For a reduce-scatter in FP8, each rank casts its partial sums with the shared scale and sends every other rank its slice. The receiver
adds the T payloads in FP32, in rank order; a sum in FP8 at each hop would round T - 1 times.

A tensor is cast before it is gathered, and the gathered payload is the GEMM's operand. So all ranks of the group must cast it with one
scale. Delayed scaling gives them one for free, because the histories are rolled over the group. Just-in-time scaling costs an all-reduce of
one number per cast. Partial sums have their own row in the layer's `LinearScaling`. Weights are not communicated, so each rank has its
own scale for its shard. NaN or Inf on one rank makes that rank's results NaN, and may not show on the others: the gradient norm is
therefore combined over the group before the optimizer decides anything.

Next: `sequence_parallel` contains the collectives, `msamp.nn.linear_fn` the autograd function that calls them at its ends, and
`msamp.comm.copies` the transport without NCCL. `tools/bench/LOG.md` records what was tried.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from msamp.comm.copies import TRANSPORTS, choose_peers
from msamp.comm.counters import WireBytes
from msamp.nn.ends import Ends, PendingRows, ReadyRows
from msamp.nn.gemm import LayerGemm, RowProduct
from msamp.nn.linear_fn import LinearFunction, LinearSettings, activation, checked_label
from msamp.nn.scaling_state import WIRE, LinearScaling
from msamp.numerics.formats import Format
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.sequence_parallel import shared_amax, start_gather, start_sum, sum_product

WIRES = ("bf16", "fp8")
SAVED_INPUTS = ("shard", "gathered")


class TensorParallel(Ends):
    """Settings and collectives that the FP8 linear layers of one tensor-parallel group share; implements `msamp.nn.ends.Ends` for the fused
    blocks that contain them.

    Args:
        group: the ranks.
        sequence_parallel: dim 0 of the activations between layers (column layers' input, row layers' output) is split over the ranks.
        wire: format in which a row-parallel layer's partial outputs are sent in forward: "bf16" (the dtype of the activations, which may be
            FP32) or "fp8".
        grad_wire: the same for a column-parallel layer's partial grad_inputs in backward.
        saved_input: what a column-parallel layer saves of its FP8 input under sequence parallelism: "shard", gathered again in backward
            while grad_input's GEMM runs, or "gathered", T times as large.
        sent: the counter of sent bytes, kind "activation"; None creates one.
        transport: "nccl", the collectives of the group's backend, whatever it is; "copies", into the other ranks' memory
            (`msamp.comm.copies`); or "auto", the faster of both where copies are possible. Collective unless it is "nccl".
        measure: whether "auto" may measure; False always uses copies where possible, so that bits do not depend on timings.

    Attributes:
        travels: the chosen transport and the reason, for logs.

    Raises:
        ValueError: an invalid `wire`, `grad_wire`, `saved_input` or `transport`, or copies between ranks that cannot copy.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool,
        wire: str = "bf16",
        grad_wire: str = "fp8",
        saved_input: str = "shard",
        sent: WireBytes | None = None,
        transport: str = "nccl",
        measure: bool = True,
    ) -> None:
        wires = (("wire", wire, WIRES), ("grad_wire", grad_wire, WIRES))
        chosen = (*wires, ("saved_input", saved_input, SAVED_INPUTS), ("transport", transport, TRANSPORTS))
        for name, value, legal in chosen:
            if value not in legal:
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(legal)}")
        self.sequence_parallel = sequence_parallel
        self.wire = wire
        self.grad_wire = grad_wire
        self.saved_input = saved_input
        self.sent = WireBytes() if sent is None else sent
        self.peers, self.travels = choose_peers(group, self.sent, transport, measure=measure)
        # For `Ends`. The group's first rank adds the bias of a block's last layer inside its GEMM, which saves a kernel.
        self.ranks, self.spread, self.adds_bias = self.peers.ranks, sequence_parallel, self.peers.rank == 0
        self.keeps_gathered = sequence_parallel and saved_input == "gathered"

    def shared_amax(self, amax: torch.Tensor) -> torch.Tensor:
        # Without sequence parallelism inputs are the same on all ranks or not sent.
        return shared_amax(amax, self.peers) if self.sequence_parallel else amax

    def start_gather(self, payload: torch.Tensor, label: str) -> PendingRows:
        return start_gather(payload, self.peers, label) if self.sequence_parallel else ReadyRows(payload)

    def sum_output(self, product: RowProduct, codes: torch.Tensor, layer: LayerGemm) -> torch.Tensor:
        """Compute and sum the partial outputs of a row-parallel layer, sent in the format of `wire`."""
        if self.wire != "fp8" and self.sequence_parallel and self.peers.copies:
            return sum_product(product, codes, self.peers, "output")
        wire = (layer.sums, layer.gemm.input) if self.wire == "fp8" else None
        return start_sum(product.of(codes), self.peers, "output", scatter=self.sequence_parallel, wire=wire)()

    def start_sum_grad(self, partial: torch.Tensor, layer: LayerGemm) -> Callable[[], torch.Tensor]:
        """Start the sum of a column-parallel layer's partial grad_inputs, sent in the format of `grad_wire`."""
        wire = (layer.sums, layer.gemm.grad_output) if self.grad_wire == "fp8" else None
        return start_sum(partial, self.peers, "grad_input", scatter=self.sequence_parallel, wire=wire)


def column_linear(
    x: torch.Tensor, weight: ScalingTensor, bias: torch.Tensor | None, scaling: LinearScaling, tp: TensorParallel
) -> torch.Tensor:
    """FP8 linear with output features split over the ranks.

    Args:
        x: BF16, FP16 or FP32; cast to the autocast dtype under autocast. [s / ranks, ..., K] with sequence parallelism, the same s on every
            rank; else [s, ..., K], the same values on every rank.
        weight: [N / ranks, K] scaled FP16 or E4M3, with its own scale.
        bias: [N / ranks] or None.
        scaling: of the layer, for `tp.grad_wire` "fp8" with a row for the partial sums of grad_input (`wire` E5M2).
        tp: the group.

    Returns:
        [s, ..., N / ranks] in the dtype of `x`.

    Raises:
        ValueError: a shape that does not fit, another input dtype, or a `scaling` without the third row.
    """
    x = _prepare(x, weight, scaling, scaling.gemm.grad_output.format if tp.grad_wire == "fp8" else None)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; this weight shard expects ({weight.shape[0]},)")
    settings = LinearSettings(LayerGemm.of(scaling, weight), input_end=tp, label=checked_label(weight, x))
    return LinearFunction.apply(x, weight, bias, settings)


def row_linear(x: torch.Tensor, weight: ScalingTensor, scaling: LinearScaling, tp: TensorParallel) -> torch.Tensor:
    """FP8 linear with input features split over the ranks. The caller adds the bias to the result.

    Args:
        x: [s, ..., K / ranks] BF16, FP16 or FP32; cast to the autocast dtype under autocast.
        weight: [N, K / ranks] scaled FP16 or E4M3, with its own scale.
        scaling: of the layer, for `tp.wire` "fp8" with a row for the partial sums of the output (`wire` E4M3).
        tp: the group.

    Returns:
        [s / ranks, ..., N] with sequence parallelism, else [s, ..., N], the same on every rank; in the dtype of `x`.

    Raises:
        ValueError: as `column_linear`; also, under sequence parallelism, an s that is not a multiple of the number of ranks.
    """
    x = _prepare(x, weight, scaling, scaling.gemm.input.format if tp.wire == "fp8" else None)
    ranks = tp.peers.ranks
    if tp.sequence_parallel and x.shape[0] % ranks:
        raise ValueError(
            f"sequence length {x.shape[0]} is not a multiple of the {ranks} ranks that sequence parallelism splits it over; "
            f"use {-(-x.shape[0] // ranks) * ranks}, or turn sequence parallelism off"
        )
    settings = LinearSettings(LayerGemm.of(scaling, weight), output_end=tp, label=checked_label(weight, x))
    return LinearFunction.apply(x, weight, None, settings)


def _prepare(x: torch.Tensor, weight: ScalingTensor, scaling: LinearScaling, wire: Format | None) -> torch.Tensor:
    """Check the input and return it in its compute dtype; `wire` is the format for which the layer's partial sums need a scale."""
    if x.dim() < 2:
        raise ValueError(f"input has shape {tuple(x.shape)}; it must be [sequence, ..., features]")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight shard has shape {tuple(weight.shape)}; an input of {x.shape[-1]} features requires (N, {x.shape[-1]})")
    if wire is not None and scaling.formats[WIRE:] != (wire,):
        raise ValueError(f"the layer has no scale for partial sums in {wire}; create its LinearScaling with wire={wire}")
    return activation(x)
