"""LayerNorm and RMSNorm: residual addition, norm and cast in one read, the transposed recomputation, and backward in one read.

Twin: `msamp.kernels.reference.normalize`.
"""

import torch
import triton
import triton.language as tl

from msamp.kernels.reference.normalize import check_normalize
from msamp.kernels.triton.cast import _bytes, _rounded, fp8_constants
from msamp.kernels.triton.cast_transpose import _code, _quantise, _tell
from msamp.kernels.triton.scale_from_amax import _inverse

# Elements per program; a longer row uses more warps.
TILE = 4096
TILE_M, TILE_N = 64, 128
# Neighbors in a row whose magnitudes a thread reduces to one maximum, which it carries from row to row.
FOLD = 8
# Shared memory for prefetching the next rows, of a multiprocessor's 227 KiB.
PREFETCH_BYTES = 100 * 1024


@triton.jit
def _normalized(x, mean, rstd, weight, bias, RMS: tl.constexpr):
    """Both calling kernels are compiled without FMA contraction, so that their rounding equals the twin's."""
    if not RMS:
        x = x - mean
    y = x * rstd * weight
    if bias is not None:
        y = y + bias
    return y


@triton.jit
def _normalize_kernel(
    x, residual, weight, bias, total, y, mean, rstd, scale, amax, scale_inv, eps, M, N,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, RMS: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    STORE: tl.constexpr = scale is not None or MANTISSA == 0
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, BLOCK)[None, :]
    inside = (m < M) & (n < N)
    at = m.to(tl.int64) * N + n
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    b = None
    if bias is not None:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        added = v + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        added = _rounded(added, x.dtype.element_ty, HARDWARE)
        if STORE:
            tl.store(total + at, added, mask=inside)
        v = added.to(tl.float32)
    mu = 0.0
    deviation = v
    if not RMS:
        mu = tl.sum(v, axis=1, keep_dims=True) / N
        deviation = tl.where(inside, v - mu, 0.0)
    r = tl.rsqrt(tl.sum(deviation * deviation, axis=1, keep_dims=True) / N + eps)
    value = _normalized(v, mu, r, w, b, RMS)
    factor = 1.0
    if STORE:
        if not RMS:
            tl.store(mean + m, mu, mask=m < M)
        tl.store(rstd + m, r, mask=m < M)
        if MANTISSA == 0:
            tl.store(y + at, _rounded(value, y.dtype.element_ty, HARDWARE), mask=inside)
        else:
            factor = tl.load(scale)
            tl.store(y + at, _code(value * factor, FP8_MAX, MANTISSA, BIAS, HARDWARE), mask=inside)
    if MANTISSA > 0:
        _tell(tl.where(inside, value, 0.0), factor, amax, scale_inv)


@triton.jit
def _normalize_transposed_kernel(
    x, mean, rstd, weight, bias, scale_inv, yt, M, N,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, RMS: tl.constexpr,
    FP8_MAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[:, None]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)[None, :]
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    b = None
    if bias is not None:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    r = tl.load(rstd + m, mask=m < M, other=0.0)
    mu = 0.0
    if not RMS:
        mu = tl.load(mean + m, mask=m < M, other=0.0)
    v = tl.load(x + m.to(tl.int64) * N + n, mask=(m < M) & (n < N), other=0.0).to(tl.float32)
    value = _normalized(v, mu, r, w, b, RMS)
    code = tl.trans(_code(value * _inverse(tl.load(scale_inv)), FP8_MAX, MANTISSA, BIAS, HARDWARE))
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[None, :]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)[:, None]
    tl.store(yt + n.to(tl.int64) * M + m, code, mask=(m < M) & (n < N))


@triton.jit
def _normalize_backward_kernel(
    grad_y, x, mean, rstd, weight, grad_residual, grad_x, grad_weight, grad_bias, maxima, M, N,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr, RMS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    n = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    grad_w = tl.zeros((ROWS, BLOCK), tl.float32)
    grad_b = tl.zeros((ROWS, BLOCK), tl.float32)
    top = tl.zeros((ROWS, BLOCK // FOLD), tl.float32)
    for first in tl.range(program * ROWS, M, programs * ROWS, num_stages=STAGES):
        m = first + tl.arange(0, ROWS)[:, None]
        inside = (m < M) & (n < N)
        at = m.to(tl.int64) * N + n
        g = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + m, mask=m < M, other=0.0)
        if not RMS:
            v = v - tl.load(mean + m, mask=m < M, other=0.0)
        normal = v * r
        wg = g * w
        grad = wg - normal * (tl.sum(wg * normal, axis=1, keep_dims=True) / N)
        if not RMS:
            grad = grad - tl.sum(wg, axis=1, keep_dims=True) / N
            grad_b += g
        grad = grad * r
        if grad_residual is not None:
            grad += tl.load(grad_residual + at, mask=inside, other=0.0).to(tl.float32)
        stored = _rounded(grad, grad_x.dtype.element_ty, HARDWARE)
        tl.store(grad_x + at, stored, mask=inside)
        if maxima is not None:
            magnitude = tl.abs(stored.to(tl.float32))
            magnitude = tl.where(inside, tl.where(magnitude == magnitude, magnitude, float("inf")), 0.0)
            top = tl.maximum(top, tl.max(tl.reshape(magnitude, (ROWS, BLOCK // FOLD, FOLD)), axis=2))
        grad_w += g * normal
    n = tl.arange(0, BLOCK)
    tl.store(grad_weight + program * N + n, tl.sum(grad_w, axis=0), mask=n < N)
    if not RMS:
        tl.store(grad_bias + program * N + n, tl.sum(grad_b, axis=0), mask=n < N)
    if maxima is not None:
        tl.store(maxima + program, tl.max(top))


def _rows(N: int) -> tuple[dict[str, int], int]:
    """Return the tile for whole rows of N elements, and its number of elements."""
    block = triton.next_power_of_2(N)
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block}, rows * block


def normalize(x, residual, weight, bias, eps, scale, amax_slot, dtype, *, rms, scale_inv_slot=None):
    """See the reference twin."""
    check_normalize(x, residual, weight, bias, dtype, rms=rms)
    x = x.contiguous()
    M, N = x.shape
    tile, elements = _rows(N)
    constants = {**tile, **fp8_constants(dtype, x.device), "RMS": rms, "num_warps": max(4, min(32, elements // 1024))}
    grid = (max(1, -(-M // tile["ROWS"])),)  # the first program writes scale_inv even without rows
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    mean = x.new_empty(0 if rms else M, dtype=torch.float32)
    rstd = x.new_empty(M, dtype=torch.float32)
    addend = None if residual is None else residual.contiguous()

    def launch(scale: torch.Tensor | None, amax: torch.Tensor | None, scale_inv: torch.Tensor | None) -> None:
        _normalize_kernel[grid](
            x, addend, weight, bias, total, _bytes(y), mean, rstd, scale, amax, scale_inv, eps, M, N, enable_fp_fusion=False, **constants
        )

    scale_inv = _quantise(launch, scale, amax_slot, scale_inv_slot, dtype, x.device)
    return total, y, scale_inv, mean, rstd


def normalize_transposed(x, mean, rstd, weight, bias, scale_inv, dtype, *, rms):
    """See the reference twin."""
    check_normalize(x, None, weight, bias, dtype, rms=rms)
    x = x.contiguous()
    M, N = x.shape
    yt = torch.empty(N, M, dtype=dtype, device=x.device)
    _normalize_transposed_kernel[-(-M // TILE_M), -(-N // TILE_N)](
        x, mean, rstd, weight, bias, scale_inv, yt.view(torch.uint8), M, N,
        TILE_M=TILE_M, TILE_N=TILE_N, RMS=rms, num_warps=8, enable_fp_fusion=False,
        **fp8_constants(dtype, x.device),
    )  # fmt: skip
    return yt


def _backward_warps(elements: int) -> tuple[int, int]:
    """Return the warps of a program with this many elements, and the programs per multiprocessor at 128 registers per thread."""
    num_warps = max(8, min(32, elements // 512))
    return num_warps, max(1, 16 // num_warps)


def parts(M: int, N: int, device: torch.device) -> int:
    """Return the number of parts in the weight and bias gradients and in the maxima: one per program, as many as fit on the GPU."""
    tile, elements = _rows(N)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return max(1, min(multiprocessors * _backward_warps(elements)[1], -(-M // tile["ROWS"])))


def normalize_backward(grad_y, x, mean, rstd, weight, grad_residual, *, rms, maxima=False):
    """See the reference twin."""
    grad_y, x = grad_y.contiguous(), x.contiguous()
    addend = None if grad_residual is None else grad_residual.contiguous()
    M, N = x.shape
    tile, elements = _rows(N)
    num_warps, resident = _backward_warps(elements)
    programs = parts(M, N, x.device)
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty(programs, N, dtype=torch.float32, device=x.device)
    grad_bias = torch.empty_like(grad_weight) if not rms else grad_weight.new_empty(0)
    tops = torch.empty((programs, 1) if maxima else 0, dtype=torch.float32, device=x.device)
    bytes_read = elements * sum(t.element_size() for t in (grad_y, x, addend) if t is not None)
    _normalize_backward_kernel[programs,](
        grad_y, x, mean, rstd, weight, addend, grad_x, grad_weight, None if rms else grad_bias, tops if maxima else None, M, N,
        FOLD=min(FOLD, tile["BLOCK"]), STAGES=2 if bytes_read <= PREFETCH_BYTES else 1, RMS=rms, HARDWARE=x.is_cuda,
        num_warps=num_warps, maxnreg=2048 // (resident * num_warps), **tile,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias, tops
