"""Cast with one power-of-two scale per small group of a row, and its inverse. Twin: `msamp.kernels.reference.group_cast`."""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.group_cast import check_group_cast
from msamp.kernels.triton.cast import _rounded, fp8_constants
from msamp.kernels.triton.cast_transpose import _code
from msamp.kernels.triton.pack import _value
from msamp.kernels.triton.scale_from_amax import _inverse
from msamp.numerics.formats import of_dtype
from msamp.numerics.scaling import _fields

BLOCK = 4096


@triton.jit
def _group_exponent(amax, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Biased exponent of the scale_inv for FP32 `amax`, int32: 1 to 253; 127 if amax is 0, 255 if it is not finite."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + (127 - EXPONENT) + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    exponent = tl.where(bits == 0, 127, exponent)
    return tl.where(amax < float("inf"), exponent, 255)


@triton.jit
def _group_scale_inv(exponent):
    """FP32 scale_inv of a stored exponent; NaN for 255."""
    bits = exponent.to(tl.int32) << 23
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _places(groups, a_row, N, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Indices int64 [GROUPS] of this program's groups and a mask of valid ones; offsets of their elements [GROUPS, SIZE] and a mask."""
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    column = ((g % a_row) * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    return g, g < groups, (g // a_row * N)[:, None] + column, (g < groups)[:, None] & (column < N)


@triton.jit
def _group_cast_kernel(
    x, y, exponents, groups, a_row, N, GROUPS: tl.constexpr, SIZE: tl.constexpr, EXPONENT: tl.constexpr, LIMIT: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    g, there, at, inside = _places(groups, a_row, N, GROUPS, SIZE)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.where(v == v, tl.abs(v), float("inf")), axis=1)
    exponent = _group_exponent(amax, EXPONENT, LIMIT)
    scale = tl.where(exponent == 255, 1.0, _inverse(_group_scale_inv(exponent)))
    tl.store(y + at, _code(v * scale[:, None], FP8_MAX, MANTISSA, BIAS, HARDWARE), mask=inside)
    tl.store(exponents + g, exponent.to(tl.uint8), mask=there)


@triton.jit
def _group_decode_kernel(
    payload, exponents, x, groups, a_row, N, GROUPS: tl.constexpr, SIZE: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr
):
    g, there, at, inside = _places(groups, a_row, N, GROUPS, SIZE)
    scale_inv = _group_scale_inv(tl.load(exponents + g, mask=there, other=127))
    v = _value(tl.load(payload + at, mask=inside, other=0), MANTISSA, HARDWARE) * scale_inv[:, None]
    tl.store(x + at, _rounded(v, x.dtype.element_ty, HARDWARE), mask=inside)


def _grid(x: torch.Tensor, size: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the number of programs, and the layout of the groups of `x` [M, N]."""
    M, N = x.shape
    a_row, held = -(-N // size), max(1, BLOCK // size)
    return (-(-M * a_row // held),), {"groups": M * a_row, "a_row": a_row, "N": N, "GROUPS": held, "SIZE": size}


def group_cast(x, size, dtype):
    """See the reference twin."""
    check_group_cast(x, size)
    x = x.contiguous()
    grid, places = _grid(x, size)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    exponents = torch.empty(x.shape[0], places["a_row"], dtype=torch.uint8, device=x.device)
    exponent, limit = _fields(of_dtype(dtype).max)
    if x.numel():
        _group_cast_kernel[grid](
            x, y.view(torch.uint8), exponents, **places, EXPONENT=exponent, LIMIT=limit, num_warps=4, **fp8_constants(dtype, x.device)
        )
    return y, exponents


def group_decode(payload, exponents, size, dtype):
    """See the reference twin."""
    check_group_cast(payload, size)
    payload = payload.contiguous()
    grid, places = _grid(payload, size)
    x = torch.empty(payload.shape, dtype=dtype, device=payload.device)
    constants = fp8_constants(payload.dtype, payload.device)
    if x.numel():
        _group_decode_kernel[grid](
            payload.view(torch.uint8), exponents.contiguous(), x, **places,
            MANTISSA=constants["MANTISSA"], HARDWARE=constants["HARDWARE"], num_warps=4,
        )  # fmt: skip
    return x
