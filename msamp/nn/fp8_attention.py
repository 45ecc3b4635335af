"""Attention in FP8: the core between QKV's rotary embedding and the output projection, forward and backward.

Attention has two products of FP8 tensors forward and five backward. The tensors, their formats, and where each scale comes from:

    queries, keys, values    E4M3    cast behind the rotary embedding; their amaxes come from that cast
    S, the softmax           E4M3    lives inside the kernel; no element is above 1, so that its scale is 256 and needs no amax
    O, the output            E4M3    cast in the kernel, which gives its amax; the projection's GEMM takes it as it is
    dO, O's gradient         E5M2    cast from the projection's grad_input; its amax comes from that cast
    dP, the scores' gradient E5M2    lives inside the kernel, which gives its amax
    dQ, dK, dV               E5M2    cast in the kernel, which gives their amaxes; the rotary embedding's backward reads them

All these scales but S's are delayed, nine rows of one `TensorScales` a layer. They are saved with the model, rolled once a step and
reduced over ranks as those of linear layers are. They are delayed with every recipe: a kernel has to know the scale of what it makes
before it makes it. A recipe that is delayed itself brings its rule, another one the default, 16 steps. A delayed scale may be too large
for a step; the cast saturates then.

Until the window is filled the scales are just in time, as those of linear layers. Queries, keys, values and dO are cast with the scale of
their own amax. O takes the scale of the values: a mean of values is no larger than the largest of them. Backward runs twice: once with
a bound for the scale of dP, for the amaxes, and once with the scales that follow from them.

Backward keeps queries, keys, values and O in FP8, a byte each, and FP32 statistics of the softmax, one number a row. Recomputation
keeps no O and no statistics and runs the forward kernel again, to the same bits. An amax that is taken twice changes nothing.

What is not finite shows: in a scale_inv that is NaN, or in an amax that is infinite.

Speed and losses: `docs/guide/choosing.md`.
"""

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
CASTS_HERE = {Q: "query", K: "key", V: "value", GRAD: "grad_attention"}  # rows with a watch: the kernel's own casts have none


class AttentionScaling(TensorScales):
    """Scales of one attention core, rows `Q` to `DV`.

    Args:
        gemm: the casts of the model's linear layers, for the rule of the input's.
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


class Attended(NamedTuple):
    """The output of attention, [s, b, heads, d] E4M3, with what backward needs beside the operands.

    Attributes:
        o: the output.
        o_scale_inv: FP32 0-dim.
        stats: FP32 [b, heads, s, 1].
        amax: FP32 0-dim, of the output before its cast.
    """

    o: torch.Tensor
    o_scale_inv: torch.Tensor
    stats: torch.Tensor
    amax: torch.Tensor


class FP8Attention(NamedTuple):
    """The attention core of one layer in this step.

    Attributes:
        scaling: its scales.
        softmax_scale: factor on the scores.
        causal: a token sees those before it; else all of its sequence.
        record: whether amaxes enter the scaling state.
    """

    scaling: AttentionScaling
    softmax_scale: float
    causal: bool
    record: bool

    @classmethod
    def of(cls, scaling: AttentionScaling, softmax_scale: float, *, causal: bool) -> "FP8Attention":
        """With the scales of now; amaxes are recorded while gradients are enabled."""
        return cls(scaling, softmax_scale, causal, torch.is_grad_enabled())

    @staticmethod
    def saved_bytes(heads: float, groups: float, head_size: int, *, output: bool) -> float:
        """Bytes per token that backward keeps of a rank's heads: the operands, and with `output` the attention's output and each head's
        statistic."""
        return head_size * (heads + 2 * groups) + ((head_size + 4) * heads if output else 0.0)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Differentiable attention: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d], of the query's dtype."""
        return _Attention.apply(query, key, value, self)

    def rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, groups: int) -> Operands:
        """The operands from the packed projection, queries and keys rotated: see `ops.rotary_cast`."""
        scaling = self.scaling
        scales = scaling.scale[:O] if scaling.delayed else None
        slots, amaxes = scalar_pool.take(qkv.device, 3), scaling.amax[:O] if self.record else None
        query, key, value, _ = ops.rotary_cast(qkv, cos, sin, heads, groups, scales, amaxes, E4M3.dtype, scale_inv_slots=slots)
        return Operands(query, key, value, slots)

    def cast(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Operands:
        """The operands from queries, keys and values as they are, in the compute dtype."""
        made = [self.cast_one(x, row) for x, row in ((query, Q), (key, K), (value, V))]
        (q, of_q), (k, of_k), (v, of_v) = made
        return Operands(q, k, v, torch.stack([of_q, of_k, of_v]))

    def cast_one(self, x: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Payload in the shape of `x` [s, b, n, d], and scale_inv."""
        slot, fmt = self.scaling.slots(self.record)[row], self.scaling.casts[row].format
        x2d = x.reshape(x.shape[0] * x.shape[1], -1)
        scale_inv = scalar_pool.take(x.device)
        payload, *_ = ops.cast_transpose(x2d, scale=slot.scale, amax_slot=slot.amax, dtype=fmt.dtype, row=True, scale_inv_slot=scale_inv)
        if slot.watch is not None:
            slot.watch(x2d, payload, scale_inv)
        return payload.view(x.shape), scale_inv

    def attend(self, of: Operands) -> Attended:
        """Attention of these operands."""
        scaling = self.scaling
        if scaling.delayed:
            o_scale, o_scale_inv = scaling.scale[O], scaling.scale_inv[O]
        else:
            o_scale_inv = of.scale_invs[2]
            o_scale = inverse(o_scale_inv)
        o, stats, amax = kernels.attention_forward(
            of.query, of.key, of.value, of.scale_invs, o_scale, self.softmax_scale, causal=self.causal
        )
        if self.record:
            raise_amax(scaling.amax[O], amax)
        return Attended(o, o_scale_inv, stats, amax)

    def gradients(self, of: Operands, attended: Attended, grad_o: torch.Tensor) -> Operands:
        """The gradients of the operands, E5M2, from that of the output in the compute dtype, [s, b, heads * d]."""
        scaling = self.scaling
        grad, of_grad = self.cast_one(grad_o.view(attended.o.shape), GRAD)
        if scaling.delayed:
            given = AttentionScales(of.scale_invs, attended.o_scale_inv, of_grad, scaling.scale[DP:], scaling.scale_inv[DP])
            *made, amaxes = self.backward(of, attended, grad, given)
            scale_invs = scaling.scale_inv[DQ:]
        else:
            scales = self._bounds(of, of_grad)
            for _ in range(2):  # for the amaxes, and with their scales
                given = AttentionScales(of.scale_invs, attended.o_scale_inv, of_grad, scales, inverse(scales[0]))
                *made, amaxes = self.backward(of, attended, grad, given)
                used, scales = scales, ops.scale_from_amax(amaxes, E5M2.max, None, 1.0)
            scale_invs = inverse(used[1:])
        if self.record:
            raise_amax(scaling.amax[DP:], amaxes)
        dq, dk, dv = made
        return Operands(dq, dk, dv, torch.add(scale_invs, amaxes[1:], alpha=0))  # NaN where an amax is infinite

    def backward(self, of: Operands, attended: Attended, grad: torch.Tensor, scales: AttentionScales) -> tuple[torch.Tensor, ...]:
        """The kernel alone: dQ, dK and dV in E5M2, and the amaxes of dP, dQ, dK and dV."""
        return kernels.attention_backward(
            of.query, of.key, of.value, attended.o, grad, attended.stats, scales, self.softmax_scale, causal=self.causal
        )

    def _bounds(self, of: Operands, of_grad: torch.Tensor) -> torch.Tensor:
        """FP32 [4]: a scale of dP that cannot overflow, and 1 for what is made from it.

        dP = S (dO V^T - rowsum(dO O)) softmax_scale, and each of the two is at most d times the largest dO times the largest value.
        """
        most = 2 * self.softmax_scale * of.value.shape[3] * E4M3.max * E5M2.max
        scale = ops.scale_from_amax((of.scale_invs[2] * of_grad * most).view(1), E5M2.max, None, 1.0)
        return torch.cat([scale, scale.new_ones(3)])


def raise_amax(slot: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise FP32 `slot` in place to `amax` of its shape."""
    torch.maximum(slot, amax, out=slot)


class _Attention(torch.autograd.Function):
    """(query, key, value, FP8Attention) -> output, in the compute dtype."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: FP8Attention) -> torch.Tensor:  # type: ignore[override]
        of = how.cast(query, key, value)
        attended = how.attend(of)
        ctx.kept, ctx.how, ctx.dtype = (of, attended), how, query.dtype
        return dequantize(attended.o, attended.o_scale_inv, query.dtype).flatten(2)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *made, scale_invs = ctx.how.gradients(*ctx.kept, grad_o.contiguous())
        return *(dequantize(x, scale_inv, ctx.dtype) for x, scale_inv in zip(made, scale_invs, strict=True)), None
