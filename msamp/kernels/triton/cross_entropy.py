"""Cross entropy with the gradient in place, one program per row. Twin: `msamp.kernels.reference.cross_entropy`.

The maximum and the sum of exponentials are computed online (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax",
algorithm 3), so a row is read twice and written once; for a vocabulary of 50,000 the second read hits the L2 cache. If the vocabulary is
sharded over ranks, two kernels do the two reads, and the ranks exchange three numbers per row between them.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _rounded

# With 16 warps a multiprocessor works on 2 rows: 26 MB of BF16 rows at a time on an H200 with 50 MB of L2.
BLOCK, WARPS = 8192, 16
LOWEST = tl.constexpr(-3.4028234663852886e38)  # FP32's lowest finite value


@triton.jit
def _largest_and_total(x, V, BLOCK: tl.constexpr):
    """The maximum of a row, and the sum of exponentials relative to it."""
    columns = tl.arange(0, BLOCK)
    # Not -inf: if all values so far are -inf, a difference of infinities would be NaN.
    largest = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = tl.load(x + start + columns, mask=start + columns < V, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(v))
        total = total * tl.exp(largest - larger) + tl.exp(v - larger)
        largest = larger
    return largest, tl.sum(total)


@triton.jit
def _write_gradient(x, y, V, at_label, weight, largest, log_total, BLOCK: tl.constexpr, HARDWARE: tl.constexpr):
    """Write `weight * (softmax - onehot)` of row `x` to `y`; no column equals `at_label` if another rank has the label."""
    columns = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        at = start + columns
        p = tl.exp(tl.load(x + at, mask=at < V, other=0.0).to(tl.float32) - largest - log_total)
        grad = weight * tl.where(at == at_label, p - 1.0, p)
        tl.store(y + at, _rounded(grad, y.dtype.element_ty, HARDWARE), mask=at < V)


@triton.jit
def _cross_entropy_kernel(logits, labels, weights, losses, V, BLOCK: tl.constexpr, HARDWARE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    known = (label >= 0) & (label < V)
    x = logits + row * V
    # Load it before the first barrier: later another warp may have overwritten it.
    picked = tl.load(x + label, mask=known, other=float("nan")).to(tl.float32)
    weight = tl.where(known, tl.load(weights + row), float("nan"))
    largest, total = _largest_and_total(x, V, BLOCK)
    # Not added to the maximum: next to large logits the sum would lose precision.
    log_total = tl.log(total)
    tl.store(losses + row, log_total - (picked - largest))
    _write_gradient(x, x, V, label, weight, largest, log_total, BLOCK, HARDWARE)


@triton.jit
def _softmax_parts_kernel(logits, labels, parts, M, V, first, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(labels + row) - first
    x = logits + row * V
    picked = tl.load(x + at, mask=(at >= 0) & (at < V), other=0.0).to(tl.float32)
    largest, total = _largest_and_total(x, V, BLOCK)
    tl.store(parts + row, largest)
    tl.store(parts + M + row, total)
    tl.store(parts + 2 * M + row, picked)


@triton.jit
def _cross_entropy_of_parts_kernel(
    source, logits, labels, weights, parts, losses, M, V, first, RANKS: tl.constexpr, BLOCK: tl.constexpr, HARDWARE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    known = (label >= 0) & (label < V * RANKS)
    weight = tl.where(known, tl.load(weights + row), float("nan"))
    largest = tl.full((), LOWEST, tl.float32)
    for rank in tl.static_range(RANKS):
        largest = tl.maximum(largest, tl.load(parts + 3 * rank * M + row))
    total = tl.zeros((), tl.float32)
    picked = tl.zeros((), tl.float32)
    for rank in tl.static_range(RANKS):
        part = parts + 3 * rank * M + row
        total += tl.load(part + M) * tl.exp(tl.load(part) - largest)
        picked += tl.load(part + 2 * M)
    log_total = tl.log(total)
    tl.store(losses + row, tl.where(known, log_total - (picked - largest), float("nan")))
    _write_gradient(source + row * V, logits + row * V, V, label - first, weight, largest, log_total, BLOCK, HARDWARE)


def _block(V: int) -> int:
    return min(BLOCK, triton.next_power_of_2(V))


def cross_entropy_(logits, labels, weights):
    """See the reference twin."""
    M, V = logits.shape
    losses = torch.empty(M, dtype=torch.float32, device=logits.device)
    if M:
        _cross_entropy_kernel[(M,)](
            logits, labels.contiguous(), weights.contiguous(), losses, V, BLOCK=_block(V), HARDWARE=logits.is_cuda, num_warps=WARPS
        )
    return losses


def softmax_parts(logits, labels, first):
    """See the reference twin."""
    M, V = logits.shape
    parts = torch.empty(3, M, dtype=torch.float32, device=logits.device)
    if M:
        _softmax_parts_kernel[(M,)](logits, labels.contiguous(), parts, M, V, first, BLOCK=_block(V), num_warps=WARPS)
    return parts


def cross_entropy_of_parts_(logits, labels, weights, parts, first, source=None):
    """See the reference twin."""
    M, V = logits.shape
    source = logits if source is None else source
    losses = torch.empty(M, dtype=torch.float32, device=logits.device)
    if M:
        _cross_entropy_of_parts_kernel[(M,)](
            source,
            logits,
            labels.contiguous(),
            weights.contiguous(),
            parts.contiguous(),
            losses,
            M,
            V,
            first,
            RANKS=parts.shape[0],
            BLOCK=_block(V),
            HARDWARE=logits.is_cuda,
            num_warps=WARPS,
        )
    return losses
