"""FP8 attention: the core between the rotary embedding and the output projection, forward and backward.

Attention has two FP8 GEMMs in forward and five in backward. Their tensors, formats, and the source of each amax:

    queries, keys, values    E4M3    cast after the rotary embedding, which measures their amaxes
    S, the softmax           E4M3    stays inside the kernel; no element is above 1, so its scale is 256 and needs no amax
    O, the kernel's output   E4M3    cast in the kernel, which returns its amax
    dO, the gradient of O    E5M2    cast by `ops.sink_backward`, which measures its amax
    dP, the scores' gradient E5M2    stays inside the kernel, which returns its amax
    dQ, dK, dV               E5M2    cast in the kernel, which returns their amaxes; the rotary embedding's backward reads them

The kernels compute attention over all keys but the first, with values whose mean per head and channel is taken out: what
`msamp.kernels.reference.attention_sink` explains and merges afterwards. The merged output is cast once, for the projection GEMM.

The gradient kernels sum dV and dK over the queries in the tensor core's accumulator, which loses what is small next to the sum
(`msamp.numerics.accumulation`): a mean of dO shrinks with the number of queries, and cannot be taken out. So backward runs for at most
`FP8_QUERIES` queries at a time, and sums these parts in the compute dtype. What each rounding of backward takes is in `kernels.GAINS`.

All scales except the scale of S are delayed, in nine rows of one `TensorScales` per layer. They are saved with the model, rolled once per
step and reduced over ranks like the scales of linear layers. Attention uses delayed scales with every recipe, since a kernel must know the
scale of its output before it computes it. The rule is the recipe's if that is delayed, otherwise the default with 16 steps. If a delayed
scale is too large for a step, the cast saturates.

Until the window is filled, the scales are just-in-time, as in linear layers. Queries, keys, values and dO use the scale of their own amax.
O uses the scale of the values, since a mean of values is no larger than the largest of them. Backward runs twice: first with an upper
bound for dP, to measure the amaxes, then with the scales that follow from them.

Queries, keys, values and O are saved for backward in FP8, 1 byte per element, with FP32 softmax statistics, one number per row. With
recomputation, O and the statistics are not saved, and backward runs the forward kernel again, with the same bits. A non-finite value shows
as a scale_inv of NaN or as an infinite amax.

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
from msamp.nn.cast_scales import CastScales
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.scaling_state import TensorScales
from msamp.numerics.accumulation import compared
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.quantize import dequantize
from msamp.numerics.recipe import Cast, Gemms
from msamp.numerics.scaling import Delayed, inverse

Q, K, V, O, GRAD, DP, DQ, DK, DV = range(9)  # noqa: E741  # rows of a layer's arrays
# Queries of one call of the gradient kernel at most: with a mean of dO of a quarter of its deviation dV loses 2.3 % with 4,096 queries,
# 5.2 with 8,192, 18 with 32,768 (H200), and 0.7 with 2,048.
FP8_QUERIES = 4096
SAMPLED = 8  # queries whose sums a record compares
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
    """Queries [s, b, heads, d], keys and values [keys, b, groups, d], E4M3, their scale_inv, FP32 [3], and `ops.attention_sink`'s result,
    FP32 [3, b, groups, d]: key and value of the sequence's first token, and the constant that was taken out of the values."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale_invs: torch.Tensor
    sink: torch.Tensor


class SinkGradients(NamedTuple):
    """What the first token adds to the gradients, as `ops.rotary_backward` takes it: ds FP32 [s, b, heads], and FP32 [3, b, groups, d] its
    key, and what is added to its dK and dV."""

    ds: torch.Tensor
    first: torch.Tensor

    def add_to(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> list[torch.Tensor]:
        """Return the sums with the gradients, FP32 in full length; the first token of each may be missing."""
        s, heads, groups = self.ds.shape[0], self.ds.shape[2], self.first.shape[2]
        whole = [torch.cat([x.new_zeros(s - len(x), *x.shape[1:]), x]).float() for x in (dq, dk, dv)]
        whole[0] += self.ds[..., None] * self.first[0].repeat_interleave(heads // groups, 1)
        whole[1][0] += self.first[1]
        whole[2][0] += self.first[2]
        return whole


class Gradients(NamedTuple):
    """Gradients of query, key and value: E5M2 with scale_inv FP32 [3], or in the compute dtype with None. With `sink`, each may lack the
    first token, and what that adds is still missing."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale_invs: torch.Tensor | None
    sink: SinkGradients | None = None


class Attended(NamedTuple):
    """The result of the forward kernels: what backward needs besides the operands.

    Attributes:
        o: the output over all keys but the first, without the center, E4M3 [rows, b, heads, d]: without the first query if that has no key.
        o_scale_inv: FP32 0-dim.
        stats: FP32 [b, heads, rows, 1].
    """

    o: torch.Tensor
    o_scale_inv: torch.Tensor
    stats: torch.Tensor


class Prepared(NamedTuple):
    """The arguments of the gradient kernels besides the operands, and what the first token adds, see `ops.sink_backward`.

    Attributes:
        grad, o: [rows, b, heads, d], E5M2 and E4M3.
        scale_inv: of `grad`, FP32 0-dim.
        stats: FP32 [b, heads, rows, 1].
        codes: of the attention output [s, b, heads, d] E4M3; empty if not requested.
        sink: what the first token adds.
        dtype: the compute dtype.
    """

    grad: torch.Tensor
    o: torch.Tensor
    scale_inv: torch.Tensor
    stats: torch.Tensor
    codes: torch.Tensor
    sink: SinkGradients
    dtype: torch.dtype

    def part(self, queries: slice) -> "Prepared":
        """Return the arguments for some of the queries."""
        return self._replace(grad=self.grad[queries], o=self.o[queries], stats=self.stats[:, :, queries])


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

    @property
    def begins(self) -> bool:
        """Whether this rank's tokens begin with the first token of the sequences."""
        return True

    def rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, groups: int) -> Operands:
        """Rotate queries and keys of the packed projection and cast the operands, see `ops.rotary_cast`."""
        scaling, rotated = self.scaling, (qkv, cos, sin, heads, groups)
        s, b, width = qkv.shape
        grouped = qkv.view(s, b, groups, heads // groups + 2, width // (heads + 2 * groups))
        sink = self.start(grouped[:, :, :, -2], grouped[:, :, :, -1], cos, sin)

        def measure() -> torch.Tensor:
            measured = scaling.amax.new_zeros(O)
            ops.rotary_cast(*rotated, None, measured, E4M3.dtype, center=sink[2])
            return measured

        scales = scaling.scale[:O] if scaling.delayed else self.first_scales(measure, E4M3.max)
        slots, amaxes = scalar_pool.take(qkv.device, 3), scaling.amax[:O] if self.record else None
        query, key, value, _ = ops.rotary_cast(*rotated, scales, amaxes, E4M3.dtype, scale_inv_slots=slots, center=sink[2])
        return self.recentered(Operands(query, key, value, slots, sink))

    def first_scales(self, measure: Callable[[], torch.Tensor], fp_max: float) -> torch.Tensor | None:
        """Return the scales of tensors that have no delayed ones yet, for a format with the largest value `fp_max`.

        Args:
            measure: returns their amaxes, FP32 [k], +inf if not finite.
            fp_max: of the format.

        Returns:
            FP32 [k]; None, here: the cast computes just-in-time scales itself.
        """
        return None

    def _scale(self, slot: CastScales, measure: Callable[[], torch.Tensor], fp_max: float) -> torch.Tensor | None:
        """Return the scale of one cast: the delayed one, or that of `first_scales`."""
        if slot.scale is not None:
            return slot.scale
        scales = self.first_scales(measure, fp_max)
        return None if scales is None else scales[0]

    def start(self, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return `ops.attention_sink` of whole sequences.

        Raises:
            ValueError: if sequences have one token: no key would be left for the kernels.
        """
        if len(key) < 2:
            raise ValueError(f"FP8 attention got sequences of {len(key)} token; at least 2 are required: keep attention in BF16")
        return ops.attention_sink(key, value, cos, sin, int(self.begins))

    def recentered(self, of: Operands) -> Operands:
        """Correct the center by the mean of the values' codes, in place, see `ops.sink_center_`."""
        ops.sink_center_(of.sink, of.value, of.scale_invs[2], int(self.begins))
        return of

    def exchange(self, of: Operands) -> Operands:
        """Return the operands for this rank's kernels. Without context parallelism these are the cast tensors themselves."""
        return of

    def cast(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Operands:
        """Cast rotated queries, keys and values from the compute dtype to the operands."""
        nothing = key.new_zeros((1, 0), dtype=torch.float32)
        sink = self.start(key, value, nothing, nothing)
        casts = [self.cast_one(x, row) for x, row in ((query, Q), (key, K), (value.float() - sink[2], V))]
        (q, of_q), (k, of_k), (v, of_v) = casts
        return self.recentered(Operands(q, k, v, torch.stack([of_q, of_k, of_v]), sink))

    def cast_one(self, x: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cast `x` [s, b, n, d] with the scale of that row; return the payload in its shape, and scale_inv."""
        slot, fmt = self.scaling.slots(self.record)[row], self.scaling.casts[row].format
        x2d = x.reshape(x.shape[0] * x.shape[1], -1)
        scale_inv, scale = scalar_pool.take(x.device), self._scale(slot, lambda: ops.amax(x2d).view(1), fmt.max)
        payload, *_ = ops.cast_transpose(x2d, scale=scale, amax_slot=slot.amax, dtype=fmt.dtype, row=True, scale_inv_slot=scale_inv)
        if slot.watch is not None:
            slot.watch(x2d, payload, scale_inv)
        return payload.view(x.shape), scale_inv

    def attend(self, of: Operands) -> Attended:
        """Run the forward kernel over all keys but the first."""
        return self.attend_part(self.others(of), causal=self.causal)

    def others(self, of: Operands) -> Operands:
        """Return the operands without the first key, and with a causal mask without the first query, which has no other key."""
        return of._replace(query=of.query[1:] if self.causal else of.query, key=of.key[1:], value=of.value[1:])

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
            for rows in scaling.sums.values():
                _tally_output(rows["output"], of, o, o_scale_inv, self.softmax_scale, causal=causal)
        return Attended(o, o_scale_inv, stats)

    def output(self, of: Operands, attended: Attended, dtype: torch.dtype, slot: CastScales, scale_inv: torch.Tensor) -> torch.Tensor:
        """Return the attention output [s, b, heads, d]: plain in a wide dtype, otherwise cast with the scale of `slot`, which records its
        amax, and with its scale_inv written to the given slot."""
        arguments = (of.query, attended.o, attended.stats, of.sink, self._two(of, attended), self.softmax_scale)

        def measure() -> torch.Tensor:
            measured = scale_inv.new_zeros(())
            ops.sink_merge(*arguments, scale_inv.new_ones(()), measured, dtype)
            return measured.view(1)

        scale = self._scale(slot, measure, E4M3.max) if dtype.itemsize == 1 else None
        return ops.sink_merge(*arguments, scale, slot.amax, dtype, scale_inv_slot=scale_inv)[0]

    def gradients(self, of: Operands, attended: Attended, grad_o: torch.Tensor) -> Gradients:
        """Return the gradients of the operands for the output's gradient [s, b, heads * d] in the compute dtype."""
        return self.prepared_gradients(of, self.prepare(of, attended, grad_o))

    def prepared_gradients(self, of: Operands, prepared: Prepared) -> Gradients:
        """Return the gradients of the operands."""
        return self.part_gradients(self.others(of), prepared, causal=self.causal)._replace(sink=prepared.sink)

    def prepare(self, of: Operands, attended: Attended, grad_o: torch.Tensor, output_scale_inv: torch.Tensor | None = None) -> Prepared:
        """Return the gradient kernels' arguments for the output's gradient [s, b, heads * d] in the compute dtype.

        Args:
            of, attended: operands and result of `attend`.
            grad_o: the output's gradient.
            output_scale_inv: of the codes that `output` returned, if they are requested again.
        """
        s, b, heads, d = of.query.shape
        grad = grad_o.reshape(s, b, heads, d)
        slot, scale_inv = self.scaling.slots(self.record)[GRAD], scalar_pool.take(grad.device)
        scale = self._scale(slot, lambda: ops.amax(grad.flatten(0, 1).flatten(1)).view(1), E5M2.max)
        arguments = (grad, of.query, attended.o, attended.stats, of.sink, self._two(of, attended), self.softmax_scale)
        others = (of.scale_invs[2], output_scale_inv)
        given, o, codes, ds, _, sums = ops.sink_backward(*arguments, scale, slot.amax, E5M2.dtype, *others, scale_inv_slot=scale_inv)
        if slot.watch is not None:
            wide = ops.sink_backward(*arguments, None, None, torch.float32, *others)[0]
            slot.watch(wide.flatten(0, 1).flatten(1), given.flatten(0, 1).flatten(1), scale_inv)
        groups = of.sink.shape[2]
        of_first = ops.sum_parts([sums], torch.float32)[0].view(2, b, groups, heads // groups, d).sum(3)
        sink = SinkGradients(ds, torch.cat([of.sink[:1], of_first]))
        return Prepared(given, o, scale_inv, attended.stats, codes, sink, grad.dtype)

    def part_gradients(self, of: Operands, prepared: Prepared, *, causal: bool) -> Gradients:
        """Return a part's share of the gradients of its operands, E5M2; with more than `FP8_QUERIES` queries in the compute dtype.

        Args:
            of: of this part, as for `attend_part`.
            prepared: of the queries of this part.
            causal: as for `attend_part`.
        """
        if len(of.query) <= FP8_QUERIES:
            return self._few_gradients(of, prepared, causal=causal)
        dq, dk, dv = (torch.empty(x.shape, dtype=prepared.dtype, device=x.device) for x in of[:3])
        for n, (queries, keys, diagonal) in enumerate(gradient_parts(len(of.query), len(of.key), causal=causal)):
            part = of._replace(query=of.query[queries], key=of.key[keys], value=of.value[keys])
            *codes, scale_invs, _ = self._few_gradients(part, prepared.part(queries), causal=diagonal)
            assert scale_invs is not None
            first = diagonal or n == 0  # of these keys; the others come after it
            totals = ((dq[queries], first or not causal), (dk[keys], first), (dv[keys], first))
            for (total, replace), x, scale_inv in zip(totals, codes, scale_invs, strict=True):
                ops.add_payload_(total, x, scale_inv, replace=replace)
        return Gradients(dq, dk, dv, None)

    def _few_gradients(self, of: Operands, prepared: Prepared, *, causal: bool) -> Gradients:
        """Return `part_gradients` of few queries: the result of the kernel."""
        scaling = self.scaling
        o_scale_inv, of_grad = of.scale_invs[2], prepared.scale_inv
        if scaling.delayed:
            given = AttentionScales(of.scale_invs, o_scale_inv, of_grad, scaling.scale[DP:], scaling.scale_inv[DP])
            *gradients, amaxes = self.backward(of, prepared, given, causal=causal)
            scale_invs = scaling.scale_inv[DQ:]
        else:
            scales = self._bounds(of, of_grad)
            for _ in range(2):  # first to measure the amaxes, then with their scales
                given = AttentionScales(of.scale_invs, o_scale_inv, of_grad, scales, inverse(scales[0]))
                *gradients, amaxes = self.backward(of, prepared, given, causal=causal)
                used, scales = scales, ops.scale_from_amax(amaxes, E5M2.max, None, 1.0)
            scale_invs = inverse(used[1:])
        if self.record:
            raise_amax(scaling.amax[DP:], amaxes)
        gained = torch.add(scale_invs, amaxes[1:], alpha=0)  # NaN if an amax is infinite
        torch._foreach_mul_(gained.unbind(), kernels.GAINS)
        return Gradients(gradients[0], gradients[1], gradients[2], gained)

    def backward(self, of: Operands, prepared: Prepared, scales: AttentionScales, *, causal: bool) -> tuple[torch.Tensor, ...]:
        """Run the FP8 gradient kernel: return dQ, dK and dV in E5M2, and the amaxes of dP, dQ, dK and dV."""
        given = (of.query, of.key, of.value, prepared.o, prepared.grad, prepared.stats)
        return kernels.attention_backward(*given, scales, self.softmax_scale, causal=causal)

    def _two(self, of: Operands, attended: Attended) -> torch.Tensor:
        """Return the scale_invs of queries and output, FP32 [2]."""
        return torch.stack([of.scale_invs[0], attended.o_scale_inv])

    def _bounds(self, of: Operands, of_grad: torch.Tensor) -> torch.Tensor:
        """Return FP32 [4]: a scale with which dP cannot overflow, and 1 for dQ, dK and dV.

        dP = S (dO V^T - rowsum(dO (O - center))) softmax_scale, and the two terms are at most d times the largest dO times the largest
        value, whose scale O - center has too.
        """
        most = 2 * self.softmax_scale * of.value.shape[3] * E4M3.max * E5M2.max
        scale = ops.scale_from_amax((of.scale_invs[2] * of_grad * most).view(1), E5M2.max, None, 1.0)
        return torch.cat([scale, scale.new_ones(3)])


def gradient_parts(queries: int, keys: int, *, causal: bool) -> list[tuple[slice, slice, bool]]:
    """Return the calls of the gradient kernel for a part of attention: queries, keys, whether the mask is causal."""
    parts = []
    for start in range(0, queries, FP8_QUERIES):
        own = slice(start, min(queries, start + FP8_QUERIES))
        if causal:
            parts += [(own, own, True), (own, slice(0, start), False)][: 1 + (start > 0)]
        else:
            parts.append((own, slice(0, keys), False))
    return parts


def _tally_output(
    row: torch.Tensor, of: Operands, o: torch.Tensor, o_scale_inv: torch.Tensor, softmax_scale: float, *, causal: bool
) -> None:
    """Compare the kernel's output of a few queries of the first sequence with attention in FP32 from the same codes, and add to `row`, FP64
    [3], `msamp.numerics.accumulation.SUMS`. The output is rounded to E4M3, which leaves at most 32 dB."""
    queries, step = len(of.query), max(1, len(of.query) // SAMPLED)
    rows = torch.arange(queries - 1, -1, -step, device=o.device)  # the last ones first: they sum over most keys
    heads, groups = of.query.shape[2], of.key.shape[2]
    query, key, value = (x[:, 0].float() * of.scale_invs[n] for n, x in enumerate((of.query[rows], of.key, of.value)))
    key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * softmax_scale
    if causal:
        scores = scores.masked_fill(torch.arange(len(key), device=o.device) > rows[:, None], -torch.inf)
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).double()
    got = (o[rows, 0].float() * o_scale_inv).double()
    row += compared(got, want)


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
        unused = scalar_pool.take(query.device)
        return attention.output(of, attended, query.dtype, CastScales(None, None, None), unused).flatten(2)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *gradients, scale_invs, sink = ctx.attention.gradients(*ctx.kept, grad_o.contiguous())
        if scale_invs is not None:
            gradients = [dequantize(x, scale_inv) for x, scale_inv in zip(gradients, scale_invs, strict=True)]
        if sink is not None:
            gradients = sink.add_to(*gradients)
        return *(x.to(ctx.dtype) for x in gradients), None
