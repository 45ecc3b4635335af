"""The LM head and its cross entropy as one autograd function, which holds the logits of only one chunk of tokens at a time.

Forward computes the gradients too, chunk by chunk, while it has the logits: the loss is a weighted sum with weights known in forward, so
backward only multiplies by the gradient of the sum. Between forward and backward, FP32 gradients [T, h] and [V, h] are saved instead of the
logits [T, V] and their FP32 copy. (For 8,192 tokens, a vocabulary of 50,304 and h = 2,048: 0.48 GB plus a chunk of 0.21 GB, instead of
2.47 GB.)

The head has three GEMMs, and `PRECISIONS` selects which run in FP8. With "fp8" it is the one that computes the logits, a third of the work:
input and weight in E4M3 with one just-in-time scale each. The gradients are computed from these logits, by 16-bit GEMMs with the unrounded
input and weight. With "fp8-all" it is all three; the gradients of the logits are saved instead of the weight gradient, which backward
computes from them (`_AllInFP8`).
"""

from collections.abc import Callable
from typing import Any

import torch

from msamp.kernels import ops
from msamp.kernels.scaled_mm import native_bf16
from msamp.nn.cast_scales import CastScales, just_in_time_scale
from msamp.nn.differentiable_once import differentiable_once
from msamp.nn.gemm import Operand, cast_operand, multiply
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.recipe import Cast, Gemms, Product
from msamp.numerics.scaling import Current

CHUNK_BYTES = 256 * 2**20  # minimum size of a chunk of logits: about 2,000 tokens with GPT-2's vocabulary
FP16_FACTOR = 2.0**12  # scales up the gradients of the logits, which the loss mask bounds: in FP16 those below 2^-24 would vanish
ROWS = 128  # a chunk is a multiple of this number of tokens, a GEMM tile
CODES = 2  # bytes of a logit's gradient in E5M2, in both layouts

# The GEMMs that run in FP8: none, only the logits', all three.
PRECISIONS = COMPUTE, LOGITS, ALL = ("bf16", "fp8", "fp8-all")

_CAST = Cast(E4M3, Current())
_GEMMS = Gemms.of(_CAST, _CAST, Cast(E5M2, Current()))
_LOGITS = Product(_CAST, _CAST)  # full accumulation: rounding errors of logits enter the loss directly
_UNSCALED = CastScales(None, None, None)

# (logits [M, V], labels [M], weights [M]) -> losses [M]; overwrites the logits with their gradient, as `ops.cross_entropy_` does.
CrossEntropy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    chunk_bytes: int | None = None,
    cross_entropy: CrossEntropy = ops.cross_entropy_,
    *,
    precision: str = COMPUTE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of `hidden @ weight.T`. Logits are rounded once to the inputs' dtype; everything after them is FP32.

    Args:
        hidden: [T, h] FP32, BF16 or FP16.
        weight: [V, h], of the same dtype.
        labels: [T] int64, 0 to V - 1; any other makes the loss and the gradients NaN.
        weights: [T] FP32, the loss mask; in FP16 at most 15 (larger ones overflow the gradients).
        chunk_bytes: approximate size of a chunk of logits; None: the default of `chunk_rows`, or `CHUNK_BYTES` without a weight gradient.
        cross_entropy: the loss of a chunk. If `weight` is a shard of the vocabulary, it combines the ranks' results
            (`msamp.parallel.vocabulary`), and the gradient of `hidden` is this rank's partial sum.
        precision: one of `PRECISIONS`; FP8 GEMMs use full accumulation. "fp8-all" saves the logits' gradients for backward, T V bytes.

    Returns:
        The sum of `weights * losses`, FP32 0-dim, differentiable in `hidden` and `weight`; and the losses in nats, [T] FP32, detached.

    Raises:
        ValueError: if shapes or dtypes do not match, or the precision is unknown.
    """
    _check(hidden, weight, labels, weights)
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; choose one of {', '.join(PRECISIONS)}")
    if precision == ALL and hidden.dtype == torch.float16:  # the saturating cast would hide an overflow
        raise ValueError(f"precision {ALL} requires torch.bfloat16 or torch.float32, but hidden is torch.float16; choose {LOGITS}")
    to_hidden, to_weight = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    if chunk_bytes is None and not to_weight:
        chunk_bytes = CHUNK_BYTES  # there is no weight gradient whose memory the logits could use
    trained = to_hidden or to_weight
    itemsize = hidden.element_size() + (CODES if trained and precision == ALL else 0)
    rows = chunk_rows(hidden.shape[0], weight.shape[0], weight.shape[1], hidden.element_size(), chunk_bytes, itemsize)
    if trained and precision == ALL:
        return _AllInFP8.apply(hidden, weight, labels, weights, rows, cross_entropy)  # type: ignore[no-any-return, no-untyped-call]
    fp8 = precision != COMPUTE
    if trained:
        return _LinearCrossEntropy.apply(hidden, weight, labels, weights, rows, cross_entropy, fp8)  # type: ignore[no-any-return, no-untyped-call]
    losses = _in_chunks(hidden, weight, labels, weights, rows, cross_entropy, fp8, None, None)
    return (weights * losses).sum(), losses


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the loss (FP32 0-dim) of transformers' `ForCausalLMLoss`, whose arguments these are, without an FP32 copy of the logits.

    `labels` [.., s] are those of the same tokens, each predicted by the position before it; `shift_labels` are already shifted.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    wanted = shift_labels.to(logits.device).reshape(-1)
    counted = wanted != ignore_index
    items = counted.sum() if num_items_in_batch is None else num_items_in_batch
    weights = counted / (items.to(logits.device) if isinstance(items, torch.Tensor) else items)
    flat = logits.reshape(-1, vocab_size)
    return _CrossEntropy.apply(flat, wanted.masked_fill(~counted, 0), weights.float())  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """(logits [M, V], labels [M], weights [M]) -> the sum of weights * losses. The logits, which alone have a gradient, are kept: the
    gradient takes their memory only in a graph's last backward, and if nothing else holds it, such as the model's output or hooks on saved
    tensors. A storage, or `grad_fn.saved_tensors` that somebody holds, is not seen."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits = logits.contiguous()
        parts = ops.softmax_parts(logits, labels, 0)
        largest, total, picked = parts
        ctx.hooked = torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        ctx.save_for_backward(logits.detach(), labels, weights, parts)
        known = (labels >= 0) & (labels < logits.shape[1])
        losses = torch.where(known, total.log() - (picked - largest), torch.nan)
        return (weights * losses).masked_fill(weights == 0, 0.0).sum()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        logits, labels, weights, parts = ctx.saved_tensors
        grad = logits if not ctx.hooked and _held_once(logits) else torch.empty_like(logits)
        ops.cross_entropy_of_parts_(grad, labels, weights * grad_loss, parts[None], 0, logits)
        return grad, None, None


def _held_once(saved: torch.Tensor) -> bool:
    """Whether a backward may overwrite a tensor saved for it: the graph is not kept, and no other tensor has the memory."""
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    storage = saved.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # of `saved` and of `storage`


def chunk_rows(
    tokens: int, vocabulary: int, features: int, itemsize: int, chunk_bytes: int | None = None, logit_bytes: int | None = None
) -> int:
    """Return the number of tokens per chunk: chunks have equal size, a multiple of 128 unless there is only one.

    The default `chunk_bytes` is the size of the weight gradient in the compute dtype, but at least `CHUNK_BYTES`. Backward allocates that
    gradient after the logits are freed, so the logits add nothing to the peak, except that an FP8 GEMM also holds the weight in FP8, V h
    bytes. A chunk then has about as many tokens as there are features: with a vocabulary of 128,256 and 4,096 features, chunks of 1,024
    tokens took 10 % longer than chunks of 4,096 (H200), because of short GEMMs and more FP32 accumulations of the weight gradient.

    Args:
        itemsize: bytes per element of the compute dtype.
        chunk_bytes: approximate size of a chunk of logits.
        logit_bytes: bytes per logit, including its gradient, if more than `itemsize`.
    """
    size = max(CHUNK_BYTES, vocabulary * features * itemsize) if chunk_bytes is None else chunk_bytes
    chunks = -(-tokens * vocabulary * (logit_bytes or itemsize) // size)
    return min(tokens, -(-tokens // (chunks * ROWS)) * ROWS)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        rows: int,
        cross_entropy: CrossEntropy,
        fp8: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = zip((hidden, weight), ctx.needs_input_grad, strict=False)
        grads = tuple(torch.empty_like(x, dtype=torch.float32) if needed else None for x, needed in wanted)
        factor = FP16_FACTOR if hidden.dtype == torch.float16 else 1.0
        losses = _in_chunks(hidden, weight, labels, weights * factor, rows, cross_entropy, fp8, *grads)
        ctx.save_for_backward(*grads)
        ctx.dtype = hidden.dtype
        ctx.factor = factor
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)
        return (weights * losses).sum(), losses

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_loss_sum: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        factor = grad_loss_sum / ctx.factor
        grads = (None if g is None else _times(g, factor, ctx.dtype) for g in ctx.saved_tensors)
        return (*grads, None, None, None, None, None)


class _AllInFP8(torch.autograd.Function):
    """All three GEMMs in FP8: input and weight in E4M3, the gradient of the logits in E5M2.

    That gradient, weights * (softmax - onehot), is bounded by the loss mask, so its scale is known in advance: it follows from the largest
    weight. E5M2 reaches down to 2^-31 of the largest value, while equal logits over a vocabulary of 100,000 have a softmax of 2^-17. The
    gradient of a logit about 21 nats below its row's largest becomes zero, which is negligible against the rest of the row. Tokens with a
    small weight have less range. Forward saves the transposed gradient, T V bytes, for the GEMM of the weight gradient. That GEMM runs in
    backward over all tokens at once, and its scale includes the gradient of the sum. So no FP32 gradient [V, h] is kept between forward and
    backward.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        rows: int,
        cross_entropy: CrossEntropy,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        x = cast_operand(hidden, _UNSCALED, _GEMMS.input, col=to_weight)
        w = cast_operand(weight, _UNSCALED, _GEMMS.weight, col=to_hidden)
        slot = CastScales(just_in_time_scale(_GEMMS.grad_output, weights.abs().amax()), None, None)
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32) if to_hidden else None
        columns = hidden.new_empty((weight.shape[0], hidden.shape[0]), dtype=E5M2.dtype) if to_weight else None
        scale_inv = hidden.new_zeros((), dtype=torch.float32)
        losses = []
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = multiply(Operand.tensorwise(x.codes[part], scale_inv=x.scale_inv), w, None, hidden.dtype, _LOGITS).contiguous()
            losses.append(cross_entropy(logits, labels[part], weights[part]))
            g = cast_operand(logits, slot, _GEMMS.grad_output, row=to_hidden, col=to_weight)
            del logits  # before the next product allocates
            scale_inv = torch.maximum(scale_inv, g.scale_inv)  # the same for each chunk, or NaN for a non-finite one
            if grad_hidden is not None:
                grad_hidden[part] = multiply(g, w.transposed(), None, torch.float32, _GEMMS.grad_input)
            if columns is not None:
                columns[:, part] = g.transposed().codes
            del g
        ctx.save_for_backward(grad_hidden, columns, scale_inv, x.payload_t, x.scale_inv)
        ctx.dtype = hidden.dtype
        token_losses = torch.cat(losses)
        ctx.mark_non_differentiable(token_losses)
        ctx.set_materialize_grads(False)
        return (weights * token_losses).sum(), token_losses

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_loss_sum: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, columns, scale_inv, x_t, x_scale_inv = ctx.saved_tensors
        to_hidden = None if grad_hidden is None else _times(grad_hidden, grad_loss_sum, ctx.dtype)
        to_weight = None
        if columns is not None:
            g = Operand.tensorwise(columns, scale_inv=scale_inv * grad_loss_sum)
            x = Operand.tensorwise(x_t, scale_inv=x_scale_inv)
            to_weight = multiply(g, x, None, ctx.dtype, _GEMMS.grad_weight)
        return to_hidden, to_weight, None, None, None, None


def _times(g: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return FP32 `g` times a factor, rounded once; torch would first round the factor to BF16 for a BF16 result."""
    if dtype == torch.bfloat16:
        return ops.cast(g, factor, dtype)
    return torch.mul(g, factor, out=torch.empty_like(g, dtype=dtype))  # no saturating cast in FP16: an overflow must stay visible


def _in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
    cross_entropy: CrossEntropy,
    fp8: bool,
    grad_hidden: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
) -> torch.Tensor:
    """Return the losses [T] FP32; write the gradients of their weighted sum to `grad_hidden` [T, h] and `grad_weight` [V, h], FP32."""
    logits = None if fp8 else hidden.new_empty(rows, weight.shape[0])
    narrow = cast_operand(weight, _UNSCALED, _CAST) if fp8 else None
    losses = []
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        x = hidden[part]
        if narrow is not None:
            chunk = multiply(cast_operand(x, _UNSCALED, _CAST), narrow, None, hidden.dtype, _LOGITS).contiguous()  # maybe a view
        else:
            assert logits is not None
            chunk = logits[: x.shape[0]]
            _product(x, weight.t(), chunk)
        losses.append(cross_entropy(chunk, labels[part], weights[part]))
        if grad_hidden is not None:
            _product(chunk, weight, grad_hidden[part])
        if grad_weight is not None:
            _product(chunk.t(), x, grad_weight, accumulate=start > 0)
        del chunk  # before the next product allocates
    return torch.cat(losses)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool = False) -> None:
    """Write `a @ b` to `out`, or add it, without a second tensor of that size on a GPU."""
    if not native_bf16(a.device) or (a.dtype == torch.float16 and not a.is_cuda):  # FP16 would round the FP32 results, and overflow
        a, b = a.float(), b.float()
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif not a.is_cuda:  # torch has no 16-bit GEMM with FP32 output on the CPU
        out.add_(a @ b) if accumulate else out.copy_(a @ b)
    elif not accumulate:
        torch.mm(a, b, out.dtype, out=out)
    elif torch.__version__ < "2.10":  # its addmm does not accept an FP32 input to add
        out.add_(torch.mm(a, b, out.dtype))
    else:
        torch.addmm(out, a, b, out.dtype, out=out)


def _check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight.dtype != hidden.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}; both must be torch.float32, both torch.bfloat16 or both torch.float16"
        )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or not hidden.shape[0]:
        raise ValueError(f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}; they must be [T, h], T at least 1, and [V, h]")
    for name, x, dtype in (("labels", labels, torch.int64), ("weights", weights, torch.float32)):
        if x.shape != hidden.shape[:1] or x.dtype != dtype:
            raise ValueError(f"{name} is {list(x.shape)} {x.dtype}; it must be [{hidden.shape[0]}] {dtype}, one per row of hidden")
