"""Cross entropy and its gradient in place, one program a row. Twin: `msamp.kernels.reference.cross_entropy`.

The maximum and the sum of exponentials are taken online (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax",
algorithm 3), so a row is read twice and written once; the second read finds a vocabulary of 50,000 in the L2 cache.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _rounded

# 16 warps hold 2 rows a multiprocessor: 26 MB of BF16 rows under way on an H200, whose L2 has 50.
BLOCK, WARPS = 8192, 16


@triton.jit
def _cross_entropy_kernel(logits, labels, weights, losses, V, BLOCK: tl.constexpr, HARDWARE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    known = (label >= 0) & (label < V)
    x = logits + row * V
    # Before the first barrier: further down another warp may have overwritten it.
    picked = tl.load(x + label, mask=known, other=float("nan")).to(tl.float32)
    weight = tl.where(known, tl.load(weights + row), float("nan"))
    columns = tl.arange(0, BLOCK)
    # The lowest finite value: where all so far is -inf, a difference of infinities would be NaN.
    largest = tl.full((), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = tl.load(x + start + columns, mask=start + columns < V, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(v))
        total = total * tl.exp(largest - larger) + tl.exp(v - larger)
        largest = larger
    # Kept apart from the maximum: their sum would lose the digits that large logits leave it.
    log_total = tl.log(tl.sum(total))
    tl.store(losses + row, log_total - (picked - largest))
    for start in range(0, V, BLOCK):
        at = start + columns
        p = tl.exp(tl.load(x + at, mask=at < V, other=0.0).to(tl.float32) - largest - log_total)
        grad = weight * tl.where(at == label, p - 1.0, p)
        tl.store(x + at, _rounded(grad, logits.dtype.element_ty, HARDWARE), mask=at < V)


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See the reference twin."""
    M, V = logits.shape
    if not logits.is_contiguous():
        raise ValueError(f"logits have strides {list(logits.stride())}; they are overwritten in place and must be row-major [M, V]")
    losses = torch.empty(M, dtype=torch.float32, device=logits.device)
    if M:
        block = min(BLOCK, triton.next_power_of_2(V))
        _cross_entropy_kernel[(M,)](
            logits, labels.contiguous(), weights.contiguous(), losses, V, BLOCK=block, HARDWARE=logits.is_cuda, num_warps=WARPS
        )
    return losses
