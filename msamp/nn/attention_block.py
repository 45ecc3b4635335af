"""The attention half of a transformer layer as one autograd function: norm, QKV, rotary embedding, attention, projection, casts fused.

Between two GEMMs one kernel runs, and it writes FP8 operands in the layout of the next GEMM. Only these tensors are saved for backward:
the residual stream (as `msamp.nn.saved_activations` defines), and in the compute dtype the rotated queries, keys and values and the
attention output. Backward recomputes from them the FP8 operands of the weight gradients (normalized input, attention output), bit for bit
if the stream is saved unrounded. This reads 2 bytes per element in backward instead of writing 1 byte in forward.

With FP8 attention (`msamp.nn.fp8_attention`), the rotary embedding writes FP8 queries, keys and values. They and the FP8 kernel's output
are saved instead of the 16-bit ones; the projection's operand is computed from them again. The rotary embedding's backward reads FP8
gradients.

If ranks that share the sequences divide the heads between them (`HeadSharing`), attention covers this rank's heads over whole sequences.
Then its queries, keys, values and output are saved by heads, and by tokens only the projection's operand, in FP8.

With norms of queries and keys (`msamp.nn.head_norms`), the queries and keys before them are saved too, and one more pass casts QKV's
gradient.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from msamp.kernels import ops, scalar_pool
from msamp.nn import block
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.ends import ALONE, Ends
from msamp.nn.fp8_attention import Attended, FP8Attention, Gradients, K, Q, V
from msamp.nn.gemm import LayerGemm, Operand
from msamp.nn.head_norms import HeadNorms, HeadNormWeights, cast_packed
from msamp.nn.saved_activations import AS_IT_IS, Saved, SavedBytes
from msamp.numerics.tensor import ScalingTensor

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class HeadSharing(Protocol):
    """Ranks that share sequences and divide the heads of attention between them, as `msamp.parallel.head_exchange` does. None of the
    methods is differentiable."""

    def spread(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange all heads of this rank's tokens, [s, b, n, d] each, for this rank's heads of all tokens,
        [ranks * s, b, n / ranks, d]."""

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Do so with another tensor, without rounding."""

    def to_tokens(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The opposite of `to_heads`."""


class AttentionSettings(NamedTuple):
    """The arguments of `AttentionBlock` that are not tensors of the autograd graph.

    Attributes:
        norm: of the input.
        qkv, proj: the two linear layers.
        core: differentiable attention: query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d].
        heads, groups: number of heads of queries, and of keys and values, on this rank.
        cos, sin: FP32 [s, r]: rotary embedding of the first r channels of a head; r = 0 without one.
        keep: whether to save tensors for backward.
        recompute: do not save the attention output; backward runs the attention again.
        saved: how the norm's input is saved for backward.
        ends: the communication of tensor parallelism at the block's input and output.
        fp8: FP8 attention, used instead of `core`.
        sharing: the ranks between which the heads of `core` are divided: it gets this rank's heads of whole sequences. None: each
            rank has whole sequences.
    """

    norm: block.Norm
    qkv: LayerGemm
    proj: LayerGemm
    core: Core
    heads: int
    groups: int
    cos: torch.Tensor
    sin: torch.Tensor
    keep: bool
    recompute: bool
    saved: Saved = AS_IT_IS
    ends: Ends = ALONE
    fp8: FP8Attention | None = None
    sharing: HeadSharing | None = None

    @property
    def first(self) -> LayerGemm:
        return self.qkv

    @property
    def last(self) -> LayerGemm:
        return self.proj


class AttentionBlock(torch.autograd.Function):
    """(x, norm weight and bias, QKV weight and bias, projection weight and bias, settings, weights) -> (x, attention's update of x).

    The weights are the four of `HeadNormWeights` for norms of queries and keys, or none. The block returns x so that the norm's backward
    kernel can add the gradient of the residual path.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        qkv_weight: ScalingTensor,
        qkv_bias: torch.Tensor | None,
        proj_weight: ScalingTensor,
        proj_bias: torch.Tensor | None,
        settings: AttentionSettings,
        *head_norms: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        b, x2d = x.shape[1], x.view(-1, x.shape[-1])
        qkv_gemm, proj, ends = settings.qkv, settings.proj, settings.ends
        n_scale_inv, o_scale_inv = scalar_pool.take(x.device), scalar_pool.take(x.device)
        norm = block.NormWeights(settings.norm, norm_weight, norm_bias)
        normed = norm.cast(x2d, None, slot=qkv_gemm.x, cast=qkv_gemm.gemm.input, ends=ends, scale_inv=n_scale_inv)
        gathered = ends.start_gather(normed.y, "input all-gather")
        w_qkv = qkv_gemm.weight(qkv_weight.payload)
        qkv = gathered.product(qkv_gemm.output_rows(n_scale_inv, w_qkv, qkv_bias, x.dtype))
        whole = gathered.keep() if ends.keeps_gathered and settings.keep else None
        gathered.done()
        packed = qkv.view(-1, b, qkv.shape[-1])
        heads = HeadNorms(packed, settings.norm, HeadNormWeights(*head_norms), settings.heads, settings.groups) if head_norms else None  # type: ignore[arg-type]
        kind = _Narrow if settings.fp8 is not None else _Wide if settings.sharing is None else _Shared
        attention = kind(packed, settings)
        o = attention.codes(o_scale_inv)
        product = proj.output_rows(o_scale_inv, proj.weight(proj_weight.payload), proj_bias if ends.adds_bias else None, x.dtype)
        delta = ends.sum_output(product, o, proj)
        if settings.keep:
            weights = (qkv_weight.payload, qkv_bias, proj_weight.payload, proj_bias)
            kept = block.KeptByBlock(norm_weight, norm_bias, normed.mean, normed.rstd, n_scale_inv, o_scale_inv, whole, *weights)
            ctx.save_for_backward(*head_norms, *settings.saved.keep(x2d), *kept)
            ctx.attention, ctx.heads, ctx.settings, ctx.head_norms = attention.kept(), heads, settings, len(head_norms)
            ctx.weight_dtypes = (qkv_weight.dtype, proj_weight.dtype)
        return x, delta.view(x.shape)

    @staticmethod
    def saved_bytes(
        hidden: float,
        heads: float,
        groups: float,
        head_size: int,
        wide: int,
        saved: Saved,
        *,
        ranks: int = 1,
        gathered: bool = False,
        recompute: bool = False,
        fp8: bool = False,
        head_norms: bool = False,
        shared: bool = False,
    ) -> SavedBytes:
        """Return the memory saved for backward, see `SavedBytes`.

        Args:
            hidden: of the residual stream.
            heads, groups, head_size: of this rank.
            wide: bytes per element of the stream.
            saved, recompute: as in `AttentionSettings`.
            ranks, gathered: number of ranks that share the rows, and whether the gathered input is saved.
            fp8: whether the attention runs in FP8.
            head_norms: whether queries and keys have norms.
            shared: whether ranks divide the heads (`HeadSharing`); heads and groups are still those before.
        """
        norm = saved.element_bytes(wide) * hidden / ranks + hidden * gathered
        before = HeadNorms.saved_bytes(heads, groups, head_size, wide) if head_norms else 0.0
        if fp8:
            return SavedBytes(norm, before + FP8Attention.saved_bytes(heads, groups, head_size, output=not recompute))
        queries, keys = heads * head_size, groups * head_size
        if shared:
            return SavedBytes(norm, before + wide * (queries + 2 * keys) + (0.0 if recompute else (wide + 1) * queries))
        copied = queries if 1 < groups < heads else 0.0  # with several groups the queries are not contiguous in the QKV output
        return SavedBytes(norm, before + wide * (queries + 2 * keys + (0.0 if recompute else queries + copied)))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_x: torch.Tensor, grad_delta: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        head_norms, (stream, kept) = saved[: ctx.head_norms], block.KeptByBlock.of(saved[ctx.head_norms :])
        of_heads: list[torch.Tensor | None] = []  # filled by `_inner`
        inner, dtype = functools.partial(_inner, ctx, stream, kept, grad_delta, head_norms, of_heads), ctx.weight_dtypes[0]
        grads = block.finish_backward(ctx.settings, stream, kept, inner(), residual=grad_x, dtype=grad_x.dtype, weight_dtype=dtype)
        return *grads, None, *of_heads


def _inner(
    ctx: Any,
    stream: Sequence[torch.Tensor],
    kept: block.KeptByBlock,
    grad_delta: torch.Tensor,
    head_norms: Sequence[torch.Tensor],
    of_heads: list[torch.Tensor | None],
) -> block.Inner:
    """Backward through the projection, the attention, the rotary embedding and the norms of the heads, whose gradients it appends to
    `of_heads`."""
    settings, attention, heads, device, dtype = ctx.settings, ctx.attention, ctx.heads, grad_delta.device, grad_delta.dtype
    del ctx.attention, ctx.heads
    qkv, proj, ends = settings.qkv, settings.proj, settings.ends
    grad_y = block.start_grad_output(proj, grad_delta, scalar_pool.take(device), ends, colsum=kept.last_bias is not None)
    again = block.start_input_again(settings, stream, kept, dtype)
    attention.again()
    grad_o = grad_y.rows.product(proj.grad_input_rows(grad_y.scale_inv, proj.weight(kept.last_weight, transpose=True), dtype))
    grad_proj = proj.grad_weight(grad_y.transposed(), attention.transposed(kept.last_scale_inv, grad_o), ctx.weight_dtypes[1])
    dq, dk, dv, scale_invs, sink = attention.gradients(grad_o)
    ds, first = (None, None) if sink is None else sink
    del attention, grad_o
    tables = (settings.cos, settings.sin)
    rotated_back = functools.partial(ops.rotary_backward, dq, dk, dv, *tables, scale_invs=scale_invs, ds=ds, sink=first)
    grad, outputs, of_norms = projection_grad(
        qkv, rotated_back, (len(settings.cos), dq.shape[1]), dtype, heads, head_norms, colsum=kept.first_bias is not None
    )
    of_heads += of_norms
    return block.Inner(grad, first_sums=outputs.sums, last_sums=grad_y.sums, last_weight=lambda: grad_proj, again=again)


def projection_grad(
    qkv: LayerGemm,
    rotated_back: Callable[..., tuple[torch.Tensor, ...]],
    shape: Sequence[int],
    dtype: torch.dtype,
    heads: HeadNorms | None,
    head_norms: Sequence[torch.Tensor],
    *,
    colsum: bool,
) -> tuple[Operand, block.CastTransposed, list[torch.Tensor | None]]:
    """Compute the QKV projection's grad_output, and cast it for both of its GEMMs.

    Args:
        qkv: the projection.
        rotated_back: `ops.rotary_backward` without the arguments of the cast.
        shape: the two leading dimensions of the packed projection.
        dtype: of the gradients.
        heads: the norms of queries and keys, or None.
        head_norms: their weights.
        colsum: also return column sums, for the bias gradient.

    Returns:
        The operand, all results of the cast, and the gradients of `head_norms`.
    """

    def plain(**options: Any) -> block.CastTransposed:
        return block.CastTransposed(*rotated_back(**options))

    run: Callable[..., block.CastTransposed] = plain
    of_heads: list[torch.Tensor | None] = []
    if heads is not None:
        packed = plain(scale=None, amax_slot=None, dtype=dtype).payload
        of_heads = heads.backward(packed.view(*shape, -1), HeadNormWeights(*head_norms))
        run = functools.partial(cast_packed, packed)
    return *block.first_grad_output(qkv, run, colsum=colsum, device=qkv.scales[1].device), of_heads


class _Wide:
    """Attention by `settings.core` in the compute dtype, from the packed projection `qkv` [s, b, width], which is rotated in place."""

    def __init__(self, qkv: torch.Tensor, settings: AttentionSettings) -> None:
        ops.rotary_(qkv, settings.cos, settings.sin, settings.heads, settings.groups)
        self.settings, self.qkv = settings, qkv
        self.parts, self.attended = self._attend()

    def _attend(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return query, key and value, and the attention output with a separate autograd graph."""
        settings = self.settings
        with torch.set_grad_enabled(settings.keep):
            # A separate graph works with any attention kernel, and returns dq, dk and dv instead of one zero-filled QKV gradient.
            parts = tuple(part.detach().requires_grad_(settings.keep) for part in split_heads(self.qkv, settings.heads, settings.groups))
            return parts, settings.core(*parts)

    @property
    def _rows(self) -> torch.Tensor:
        """The attention output [tokens of all ranks, channels]."""
        assert self.attended is not None
        return self.attended.detach().view(self.qkv.shape[0] * self.qkv.shape[1], -1)

    def codes(self, scale_inv: torch.Tensor) -> torch.Tensor:
        """Return the projection's input in FP8, with its scale_inv written to the given slot."""
        return _cast_rows(self.settings.proj, self._rows, scale_inv)

    def kept(self) -> "_Wide":
        """Return this object, without the tensors that backward recomputes."""
        if self.settings.recompute:
            self.parts, self.attended = (), None
        return self

    def again(self) -> None:
        """Run the attention again if its output was not saved."""
        if self.attended is None:
            self.parts, self.attended = self._attend()

    def transposed(self, scale_inv: torch.Tensor, grad_o: torch.Tensor) -> Operand:
        """Return the projection's input, transposed for grad_weight, before `gradients` of the same `grad_o`."""
        return Operand.tensorwise(scale_inv=scale_inv, payload_t=ops.cast_transposed(self._rows, scale_inv, self.settings.proj.x_dtype))

    def gradients(self, grad_o: torch.Tensor) -> Gradients:
        """Return the gradients of query, key and value."""
        assert self.attended is not None
        dq, dk, dv = torch.autograd.grad(self.attended, self.parts, grad_o.view(self.attended.shape))
        self.parts, self.attended = (), None
        return Gradients(dq, dk, dv, None)


def _cast_rows(proj: LayerGemm, rows: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Return the projection's input in FP8, with its scale_inv written to the given slot."""
    x = proj.x
    options: dict[str, Any] = {"scale": x.scale, "amax_slot": x.amax, "dtype": proj.x_dtype, "scale_inv_slot": scale_inv}
    o8 = block.CastTransposed(*ops.cast_transpose(rows, row=True, **options)).payload
    if x.watch is not None:
        x.watch(rows, o8, scale_inv)
    return o8


class _Shared:
    """Attention by `settings.core` of this rank's heads, with the methods of `_Wide`; `qkv` is rotated in place, and not saved."""

    def __init__(self, qkv: torch.Tensor, settings: AttentionSettings) -> None:
        assert settings.sharing is not None
        ops.rotary_(qkv, settings.cos, settings.sin, settings.heads, settings.groups)
        self.settings, self.sharing = settings, settings.sharing
        parts = self.sharing.spread(*split_heads(qkv, settings.heads, settings.groups))
        self.parts = tuple(part.detach().requires_grad_(settings.keep) for part in parts)
        self.attended: torch.Tensor | None = self._attend()
        self.payload: torch.Tensor | None = None

    def _attend(self) -> torch.Tensor:
        """Return the output of this rank's heads, with a separate autograd graph."""
        with torch.set_grad_enabled(self.settings.keep):
            return self.settings.core(*self.parts)

    def _rows(self) -> torch.Tensor:
        """Return the attention output [tokens of this rank, channels]."""
        assert self.attended is not None
        (o,) = self.sharing.to_tokens(self.attended.detach().view(self.parts[0].shape))
        return o.flatten(0, 1).flatten(1)

    def codes(self, scale_inv: torch.Tensor) -> torch.Tensor:
        self.payload = _cast_rows(self.settings.proj, self._rows(), scale_inv)
        return self.payload

    def kept(self) -> "_Shared":
        if self.settings.recompute:
            self.attended = self.payload = None
        return self

    def again(self) -> None:
        if self.attended is None:
            self.attended = self._attend()

    def transposed(self, scale_inv: torch.Tensor, grad_o: torch.Tensor) -> Operand:
        if self.payload is not None:
            return Operand.tensorwise(scale_inv=scale_inv, payload_t=ops.transpose(self.payload))
        return Operand.tensorwise(scale_inv=scale_inv, payload_t=ops.cast_transposed(self._rows(), scale_inv, self.settings.proj.x_dtype))

    def gradients(self, grad_o: torch.Tensor) -> Gradients:
        assert self.attended is not None
        _, b, _, d = self.parts[0].shape
        of_heads = self.sharing.to_heads(grad_o.view(-1, b, self.settings.heads, d))
        of_parts = torch.autograd.grad(self.attended, self.parts, of_heads.view(self.attended.shape))
        self.parts, self.attended = (), None
        dq, dk, dv = self.sharing.to_tokens(*of_parts)
        return Gradients(dq, dk, dv, None)


class _Narrow:
    """Attention by `settings.fp8`, with the methods of `_Wide`; the packed projection `qkv` [s, b, width] is only read, and not saved."""

    def __init__(self, qkv: torch.Tensor, settings: AttentionSettings) -> None:
        assert settings.fp8 is not None
        self.settings, self.fp8 = settings, settings.fp8
        self.operands = self.fp8.rotate(qkv, settings.cos, settings.sin, settings.heads, settings.groups)
        self._tell(qkv)
        self.operands = self.fp8.exchange(self.operands)
        self.attended: Attended | None = self.fp8.attend(self.operands)

    def _tell(self, qkv: torch.Tensor) -> None:
        """Call the watches of query, key and value with the values before and after the cast."""
        watches = self.fp8.scaling.slots(self.fp8.record)
        if any(watches[row].watch is not None for row in (Q, K, V)):
            wide = qkv.clone()
            ops.rotary_(wide, self.settings.cos, self.settings.sin, self.settings.heads, self.settings.groups)
            parts = split_heads(wide, self.settings.heads, self.settings.groups)
            mean = self.fp8.start(*parts[1:], self.settings.cos[:, :0], self.settings.sin[:, :0])[2]
            parts = (*parts[:2], parts[2].float() - mean)
            for row, part, payload, scale_inv in zip((Q, K, V), parts, self.operands[:3], self.operands.scale_invs, strict=True):
                watch = watches[row].watch
                if watch is not None:
                    watch(part.flatten(0, 1).flatten(1), payload.flatten(0, 1).flatten(1), scale_inv)

    def codes(self, scale_inv: torch.Tensor) -> torch.Tensor:
        assert self.attended is not None
        x, dtype = self.settings.proj.x, self.settings.proj.x_dtype
        rows = self.fp8.output(self.operands, self.attended, dtype, x, scale_inv).flatten(0, 1).flatten(1)
        if x.watch is not None:
            wide = self.fp8.output(self.operands, self.attended, torch.float32, x._replace(amax=None), torch.zeros_like(scale_inv))
            x.watch(wide.flatten(0, 1).flatten(1), rows, scale_inv)
        return rows

    def kept(self) -> "_Narrow":
        if self.settings.recompute:
            self.attended = None
        return self

    def again(self) -> None:
        if self.attended is None:
            self.attended = self.fp8.attend(self.operands)

    def transposed(self, scale_inv: torch.Tensor, grad_o: torch.Tensor) -> Operand:
        assert self.attended is not None
        self.prepared = self.fp8.prepare(self.operands, self.attended, grad_o, scale_inv)
        self.attended = None
        return Operand.tensorwise(scale_inv=scale_inv, payload_t=ops.transpose(self.prepared.codes.flatten(0, 1).flatten(1)))

    def gradients(self, grad_o: torch.Tensor) -> Gradients:
        return self.fp8.prepared_gradients(self.operands, self.prepared)


def split_heads(qkv: torch.Tensor, heads: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a QKV projection in Megatron's order (for each group its queries, key, value).

    Args:
        qkv: [s, b, (heads + 2 groups) * d].
        heads, groups: number of heads of queries, and of keys and values.

    Returns:
        Query [s, b, heads, d], key and value [s, b, groups, d]: views, except for the query if a group has several heads.
    """
    s, b, width = qkv.shape
    grouped = qkv.view(s, b, groups, heads // groups + 2, width // (heads + 2 * groups))
    query, key, value = grouped.split([heads // groups, 1, 1], dim=3)
    return query.reshape(s, b, heads, -1), key.squeeze(3), value.squeeze(3)
