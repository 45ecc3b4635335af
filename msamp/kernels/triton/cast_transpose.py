"""Scaled cast that leaves both layouts, one read of the input. Twin: `msamp.kernels.reference.cast_transpose`."""

import torch
import triton
import triton.language as tl

from msamp.kernels.triton.cast import _block_amax, _fp8_code, fp8_constants

# The tile of the design probe on an H200; `tools/bench/bench_cast.py` measures others.
TILE_M, TILE_N = 128, 64


@triton.jit
def _cast_transpose_kernel(
    x, y, yt, scale, amax, M, N,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, AMAX: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    inside = (m[:, None] < M) & (n[None, :] < N)
    v = tl.load(x + m[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if AMAX:
        tl.atomic_max(amax, _block_amax(v), sem="relaxed")
    code = _fp8_code(v * tl.load(scale), FP8_MAX, MANTISSA, BIAS, HARDWARE)
    tl.store(y + m[:, None] * N + n[None, :], code, mask=inside)
    tl.store(yt + n[:, None] * M + m[None, :], tl.trans(code), mask=(n[:, None] < N) & (m[None, :] < M))


def cast_transpose(
    x: torch.Tensor, scale: torch.Tensor, amax_slot: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference twin."""
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    yt = torch.empty(N, M, dtype=dtype, device=x.device)
    grid = (triton.cdiv(M, TILE_M), triton.cdiv(N, TILE_N))
    amax = scale if amax_slot is None else amax_slot
    constants = fp8_constants(dtype, x.device)
    _cast_transpose_kernel[grid](
        x, y.view(torch.uint8), yt.view(torch.uint8), scale, amax, M, N,
        TILE_M=TILE_M, TILE_N=TILE_N, AMAX=amax_slot is not None, num_warps=8, **constants,
    )  # fmt: skip
    return y, yt
