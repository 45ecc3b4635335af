"""Cast with a given scale, in one read of the input. Twin: `msamp.kernels.reference.cast`."""

import functools

import torch
import triton
import triton.language as tl

from msamp.numerics.formats import of_dtype

BLOCK = 8192


@triton.jit
def _fp8_code(v, FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the code (uint8) of FP32 `v`, rounded to nearest even and saturated; NaN remains NaN.

    Without HARDWARE it rounds in integers, because Triton's interpreter rounds ties away from zero and loses carries.
    """
    clamped = tl.minimum(tl.maximum(v, -FP8_MAX), FP8_MAX)
    if HARDWARE:
        FP8: tl.constexpr = tl.float8e4nv if MANTISSA == 3 else tl.float8e5
        code = clamped.to(FP8).to(tl.uint8, bitcast=True)
    else:
        bits = tl.abs(clamped).to(tl.int32, bitcast=True)
        SHIFT: tl.constexpr = 23 - MANTISSA
        even = bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
        normal = (even >> SHIFT) - ((127 - BIAS) << MANTISSA)
        # Adding 2^(1 - BIAS + SHIFT) makes the FP32 adder round at the spacing of the format's subnormals.
        MAGIC: tl.constexpr = (1 - BIAS + SHIFT + 127) << 23
        magic = tl.full(bits.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
        subnormal = (tl.abs(clamped) + magic).to(tl.int32, bitcast=True) - MAGIC
        code = tl.where(bits < ((1 - BIAS + 127) << 23), subnormal, normal).to(tl.uint8)
    sign = ((v.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
    if not HARDWARE:
        code = code | sign
    return tl.where(v == v, code, sign | 0x7F)


@triton.jit
def _rounded(v, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """Round FP32 `v` to nearest even in DTYPE; for BF16 Triton's interpreter would truncate."""
    if not HARDWARE and tl.bfloat16 == DTYPE:
        bits = v.to(tl.int32, bitcast=True)
        even = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        v = tl.where(v == v, even, v)
    return v.to(DTYPE)


@triton.jit
def _block_amax(v):
    return tl.max(tl.where(v == v, tl.abs(v), float("inf")))


@triton.jit
def _cast_kernel(
    x, y, scale, numel,
    BLOCK: tl.constexpr, FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32) * tl.load(scale)
    code = _rounded(v, y.dtype.element_ty, HARDWARE) if MANTISSA == 0 else _fp8_code(v, FP8_MAX, MANTISSA, BIAS, HARDWARE)
    tl.store(y + at, code, mask=at < numel)


@functools.cache
def fp8_constants(dtype: torch.dtype, device: torch.device) -> dict[str, float | int | bool]:
    """Return the format of `dtype` as compile-time constants of a kernel, with MANTISSA 0 for a dtype that is stored without a cast;
    HARDWARE is False under the interpreter (CPU tensors)."""
    of_format: dict[str, float | int | bool] = {"FP8_MAX": 0.0, "MANTISSA": 0, "BIAS": 0}
    if dtype.itemsize == 1:
        fmt = of_dtype(dtype)
        of_format = {"FP8_MAX": fmt.max, "MANTISSA": fmt.mantissa_bits, "BIAS": {3: 7, 2: 15}[fmt.mantissa_bits]}
    return {**of_format, "HARDWARE": device.type == "cuda"}


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return FP8 codes as bytes, as kernels read and write them, and a tensor in a wider format as it is."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def cast(x, scale, dtype):
    """See the reference twin."""
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    numel = x.numel()
    _cast_kernel[-(-numel // BLOCK),](x, _bytes(y), scale, numel, BLOCK=BLOCK, num_warps=8, **fp8_constants(dtype, x.device))
    return y
