"""FP8 attention: the core between the rotary embedding and the output projection, forward and backward.

Attention has two FP8 GEMMs in forward and five in backward. Their tensors, formats, and the source of each amax:

    queries, keys, values    E4M3    cast after the rotary embedding, which measures their amaxes
    S, the softmax           E4M3    stays inside the kernel; no element is above 1, so its scale is 256 and needs no amax
    O, the output            E4M3    cast in the kernel, which returns its amax; it is the projection GEMM's operand
    dO, the gradient of O    E5M2    cast from the projection's grad_input, which measures its amax
    dP, the scores' gradient E5M2    stays inside the kernel, which returns its amax
    dQ, dK, dV               E5M2    cast in the kernel, which returns their amaxes; the rotary embedding's backward reads them

All scales except the scale of S are delayed, in nine rows of one `TensorScales` per layer. They are saved with the model, rolled once per
step and reduced over ranks like the scales of linear layers. Attention uses delayed scales with every recipe, since a kernel must know the
scale of its output before it computes it. The rule is the recipe's if that is delayed, otherwise the default with 16 steps. If a delayed
scale is too large for a step, the cast saturates.

Until the window is filled, the scales are just-in-time, as in linear layers. Queries, keys, values and dO use the scale of their own amax.
O uses the scale of the values, since a mean of values is no larger than the largest of them. Backward runs twice: first with an upper
bound for dP, to measure the amaxes, then with the scales that follow from them.

Queries, keys, values and O are saved for backward in FP8, 1 byte per element, with FP32 softmax statistics, one number per row. With
recomputation, O and the statistics are not saved, and backward runs the forward kernel again, with the same bits. Recording an amax twice
changes nothing.

A non-finite value shows as a scale_inv of NaN or as an infinite amax.

The methods of a part compute attention over some of the keys only; `msamp.parallel.fp8_ring_attention` merges the parts of several ranks,
and `msamp.parallel.fp8_head_exchange` divides the heads between them.

Speed and losses: `docs/guide/choosing.md`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from msamp.kernels import fp8_attention as kernels
from msamp.kernels import ops, scalar_pool
from msamp.kernels.reference.fp8_attention import AttentionScales
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.scaling_state import TensorScales
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.quantize import dequantize
from msamp.numerics.recipe import Cast, Gemms
from msamp.numerics.scaling import Delayed, inverse

Q, K, V, O, GRAD, DP, DQ, DK, DV = range(9)  # noqa: E741  # rows of a layer's arrays
CASTS_HERE = {Q: "query", K: "key", V: "value", GRAD: "grad_attention"}  # rows with a watch; casts inside the kernel have none


class AttentionScaling(TensorScales):
    """Scales of one attention core, rows `Q` to `DV`.

    Args:
        gemm: the casts of the model's linear layers; a delayed rule of the input is used here too.
        device: of the buffers.
    """

    def __init__(self, gemm: Gemms, device: torch.device | str | None = None) -> None:
        rule = gemm.input.scaling if gemm.input.scaling.window else Delayed()
        super().__init__((Cast(E4M3, rule),) * GRAD + (Cast(E5M2, rule),) * (DV + 1 - GRAD), device)

    def extra_repr(self) -> str:
        return f"queries, keys, values, output {self.casts[Q]}, gradients {self.casts[GRAD]}"


class Operands(NamedTuple):
    """Queries [s, b, heads, d], keys and values [s, b, groups, d], E4M3, and their scale_inv, FP32 [3]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale_invs: torch.Tensor


class Gradients(NamedTuple):
    """Gradients of query, key and value in their shapes: E5M2 with scale_inv FP32 [3], or in the compute dtype with None."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale_invs: torch.Tensor | None


class Attended(NamedTuple):
    """The result of attention: what backward needs besides the operands.

    Attributes:
        o: the output, E4M3 [s, b, heads, d].
        o_scale_inv: FP32 0-dim.
        stats: FP32 [b, heads, s, 1].
        amax: FP32 0-dim, of the output before its cast.
    """

    o: torch.Tensor
    o_scale_inv: torch.Tensor
    stats: torch.Tensor
    amax: torch.Tensor


@dataclass(frozen=True)
class FP8Attention:
    """The attention core of one layer in this step.

    Attributes:
        scaling: its scales.
        softmax_scale: factor of the scores.
        causal: whether a token attends only to itself and earlier tokens.
        record: whether to record amaxes in the scaling state.
    """

    scaling: AttentionScaling
    softmax_scale: float
    causal: bool
    record: bool

    @classmethod
    def of(cls, scaling: AttentionScaling, softmax_scale: float, *, causal: bool) -> "FP8Attention":
        """Take the current scales; amaxes are recorded while gradients are enabled."""
        return cls(scaling, softmax_scale, causal, torch.is_grad_enabled())

    @staticmethod
    def saved_bytes(heads: float, groups: float, head_size: int, *, output: bool) -> float:
        """Return the bytes per token saved for backward for a rank's heads: the operands, and with `output` also the attention output and
        one statistic per head."""
        return head_size * (heads + 2 * groups) + ((head_size + 4) * heads if output else 0.0)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Differentiable attention: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d] in the query's dtype."""
        return _Attention.apply(query, key, value, self)

    def rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, groups: int) -> Operands:
        """Rotate queries and keys of the packed projection and cast the operands, see `ops.rotary_cast`."""
        scaling, rotated = self.scaling, (qkv, cos, sin, heads, groups)

        def measure() -> torch.Tensor:
            measured = scaling.amax.new_zeros(O)
            ops.rotary_cast(*rotated, None, measured, E4M3.dtype)
            return measured

        scales = scaling.scale[:O] if scaling.delayed else self.first_scales(measure, E4M3.max)
        slots, amaxes = scalar_pool.take(qkv.device, 3), scaling.amax[:O] if self.record else None
        query, key, value, _ = ops.rotary_cast(*rotated, scales, amaxes, E4M3.dtype, scale_inv_slots=slots)
        return Operands(query, key, value, slots)

    def first_scales(self, measure: Callable[[], torch.Tensor], fp_max: float) -> torch.Tensor | None:
        """Return the scales of tensors that have no delayed ones yet, for a format with the largest value `fp_max`.

        Args:
            measure: returns their amaxes, FP32 [k], +inf if not finite.
            fp_max: of the format.

        Returns:
            FP32 [k]; None, here: the cast computes just-in-time scales itself.
        """
        return None

    def exchange(self, of: Operands) -> Operands:
        """Return the operands for this rank's kernels. Without context parallelism these are the cast tensors themselves."""
        return of

    def cast(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Operands:
        """Cast queries, keys and values from the compute dtype to the operands."""
        casts = [self.cast_one(x, row) for x, row in ((query, Q), (key, K), (value, V))]
        (q, of_q), (k, of_k), (v, of_v) = casts
        return Operands(q, k, v, torch.stack([of_q, of_k, of_v]))

    def cast_one(self, x: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cast `x` [s, b, n, d] with the scale of that row; return the payload in its shape, and scale_inv."""
        slot, fmt = self.scaling.slots(self.record)[row], self.scaling.casts[row].format
        x2d = x.reshape(x.shape[0] * x.shape[1], -1)
        scale_inv, scale = scalar_pool.take(x.device), slot.scale
        if scale is None and (scales := self.first_scales(lambda: ops.amax(x2d).view(1), fmt.max)) is not None:
            scale = scales[0]
        payload, *_ = ops.cast_transpose(x2d, scale=scale, amax_slot=slot.amax, dtype=fmt.dtype, row=True, scale_inv_slot=scale_inv)
        if slot.watch is not None:
            slot.watch(x2d, payload, scale_inv)
        return payload.view(x.shape), scale_inv

    def attend(self, of: Operands) -> Attended:
        """Compute the output."""
        return self.attend_part(of, causal=self.causal)

    def attend_part(self, of: Operands, *, causal: bool) -> Attended:
        """Run the forward kernel, with keys and values [keys, b, groups, d]: with a causal mask, as many as queries."""
        scaling = self.scaling
        if scaling.delayed:
            o_scale, o_scale_inv = scaling.scale[O], scaling.scale_inv[O]
        else:
            o_scale_inv = of.scale_invs[2]
            o_scale = inverse(o_scale_inv)
        o, stats, amax = kernels.attention_forward(of.query, of.key, of.value, of.scale_invs, o_scale, self.softmax_scale, causal=causal)
        if self.record:
            raise_amax(scaling.amax[O], amax)
        return Attended(o, o_scale_inv, stats, amax)

    def gradients(self, of: Operands, attended: Attended, grad_o: torch.Tensor) -> Gradients:
        """Return the gradients of the operands for the output's gradient [s, b, heads * d] in the compute dtype."""
        grad, of_grad = self.cast_one(grad_o.view(attended.o.shape), GRAD)
        return self.part_gradients(of, attended, grad, of_grad, causal=self.causal)

    def part_gradients(self, of: Operands, attended: Attended, grad: torch.Tensor, of_grad: torch.Tensor, *, causal: bool) -> Gradients:
        """Return a part's share of the gradients of its operands, E5M2.

        Args:
            of: of this part, as for `attend_part`.
            attended: of the queries of this part, over all keys.
            grad, of_grad: the gradient of their output [s, b, heads, d], E5M2, and its scale_inv.
            causal: as for `attend_part`.
        """
        scaling = self.scaling
        if scaling.delayed:
            given = AttentionScales(of.scale_invs, attended.o_scale_inv, of_grad, scaling.scale[DP:], scaling.scale_inv[DP])
            *gradients, amaxes = self.backward(of, attended, grad, given, causal=causal)
            scale_invs = scaling.scale_inv[DQ:]
        else:
            scales = self._bounds(of, attended, of_grad)
            for _ in range(2):  # first to measure the amaxes, then with their scales
                given = AttentionScales(of.scale_invs, attended.o_scale_inv, of_grad, scales, inverse(scales[0]))
                *gradients, amaxes = self.backward(of, attended, grad, given, causal=causal)
                used, scales = scales, ops.scale_from_amax(amaxes, E5M2.max, None, 1.0)
            scale_invs = inverse(used[1:])
        if self.record:
            raise_amax(scaling.amax[DP:], amaxes)
        dq, dk, dv = gradients
        return Gradients(dq, dk, dv, torch.add(scale_invs, amaxes[1:], alpha=0))  # NaN if an amax is infinite

    def backward(
        self, of: Operands, attended: Attended, grad: torch.Tensor, scales: AttentionScales, *, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        """Run the backward kernel: return dQ, dK and dV in E5M2, and the amaxes of dP, dQ, dK and dV."""
        return kernels.attention_backward(
            of.query, of.key, of.value, attended.o, grad, attended.stats, scales, self.softmax_scale, causal=causal
        )

    def _bounds(self, of: Operands, attended: Attended, of_grad: torch.Tensor) -> torch.Tensor:
        """Return FP32 [4]: a scale with which dP cannot overflow, and 1 for dQ, dK and dV.

        dP = S (dO V^T - rowsum(dO O)) softmax_scale, and the two terms are at most d times the largest dO times the largest value, and
        times the largest output, to which values of other parts may have contributed.
        """
        most = 2 * self.softmax_scale * of.value.shape[3] * E4M3.max * E5M2.max
        largest = torch.maximum(of.scale_invs[2], attended.o_scale_inv)
        scale = ops.scale_from_amax((largest * of_grad * most).view(1), E5M2.max, None, 1.0)
        return torch.cat([scale, scale.new_ones(3)])


def raise_amax(slot: torch.Tensor, amax: torch.Tensor) -> None:
    """Set FP32 `slot` to the maximum of itself and `amax`, in place."""
    torch.maximum(slot, amax, out=slot)


class _Attention(torch.autograd.Function):
    """(query, key, value, FP8Attention) -> output in the compute dtype."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: FP8Attention) -> torch.Tensor:  # type: ignore[override]
        of = attention.exchange(attention.cast(query, key, value))
        attended = attention.attend(of)
        ctx.kept, ctx.attention, ctx.dtype = (of, attended), attention, query.dtype
        return dequantize(attended.o, attended.o_scale_inv, query.dtype).flatten(2)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *gradients, scale_invs = ctx.attention.gradients(*ctx.kept, grad_o.contiguous())
        if scale_invs is not None:
            gradients = [dequantize(x, scale_inv, ctx.dtype) for x, scale_inv in zip(gradients, scale_invs, strict=True)]
        return *gradients, None
