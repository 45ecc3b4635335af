"""Sum of squares as integers, one read of the input. Twin: `msamp.kernels.reference.square_sum`."""

import torch
import triton
import triton.language as tl

BLOCK = 2048
PROGRAMS = 1024  # partial sums; each program adds up every PROGRAMS-th block


@triton.jit
def _round(v):
    # Added to 3 * 2^51, the FP64 adder rounds to a whole number, ties to even.
    return (v + 6755399441055744.0) - 6755399441055744.0


@triton.jit
def _square_sum_kernel(x, factor, partial, units, numel, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    f = tl.load(factor)
    whole_sum = tl.zeros((BLOCK,), tl.int64)
    rest_sum = tl.zeros((BLOCK,), tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32).to(tl.float64) * f
        squares = v * v * units
        whole = _round(squares)
        whole_sum += whole.to(tl.int64)
        rest_sum += _round((squares - whole) * 1073741824.0).to(tl.int64)
        start += PROGRAMS * BLOCK
    tl.store(partial + 2 * tl.program_id(0), tl.sum(whole_sum, 0))
    tl.store(partial + 2 * tl.program_id(0) + 1, tl.sum(rest_sum, 0))


def square_sum(x: torch.Tensor, factor: torch.Tensor, units: float) -> torch.Tensor:
    """See the reference twin."""
    x = x.contiguous()
    programs = max(1, min(PROGRAMS, triton.cdiv(x.numel(), BLOCK)))
    partial = torch.empty(programs, 2, dtype=torch.int64, device=x.device)
    _square_sum_kernel[(programs,)](x, factor, partial, units, x.numel(), BLOCK=BLOCK, PROGRAMS=programs)
    return partial.sum(0)
