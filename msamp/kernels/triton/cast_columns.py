"""Cast with a given scale and divide the columns by powers of two, in one read. Twin: `msamp.kernels.reference.cast_columns`."""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.cast_columns import check_channel_scale
from msamp.kernels.triton.cast import _constants, _fp8_code
from msamp.kernels.triton.cast_transpose import _inverse
from msamp.kernels.triton.pack import _value
from msamp.numerics.formats import of_dtype

TILE_M, TILE_N, WARPS = 16, 512, 8


@triton.jit
def _cast_columns_kernel(
    x, y, scale, channel_scale, M, N,
    SOURCE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * TILE_M, tl.program_id(1).to(tl.int64) * TILE_N
    m, n = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    columns = n < (N - column).to(tl.int32)
    inside = (m < (M - row).to(tl.int32))[:, None] & columns[None, :]
    at = row * N + column + m.to(tl.int64)[:, None] * N + n[None, :]
    factor = _inverse(tl.load(channel_scale + column + n, mask=columns, other=1.0))
    if scale is not None:
        factor = factor * tl.load(scale)
    v = _value(tl.load(x + at, mask=inside, other=0), SOURCE, HARDWARE) * factor[None, :]
    if MANTISSA > 0:
        tl.store(y + at, _fp8_code(v, FP8_MAX, MANTISSA, BIAS, HARDWARE), mask=inside)
    else:
        tl.store(y + at, v, mask=inside)


def cast_columns(x, scale, channel_scale, dtype):
    """See the reference twin."""
    check_channel_scale(x, channel_scale)
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    if x.numel():
        _cast_columns_kernel[triton.cdiv(M, TILE_M), triton.cdiv(N, TILE_N)](
            *(t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (x, y)), scale, channel_scale.contiguous(), M, N,
            SOURCE=of_dtype(x.dtype).mantissa_bits, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=WARPS, **_constants(dtype, x.device),
        )  # fmt: skip
    return y
