"""FP8 GEMMs with one scale per operand (`scaled_mm`) or per block (`block_scaled_mm`).

They run `torch._scaled_mm` if the hardware supports it, and otherwise a GEMM of the dequantized operands.
"""

import functools
import platform
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.torch_version import TorchVersion

from msamp.numerics import accumulation
from msamp.numerics.block_scale import values
from msamp.numerics.granularity import Block

ALIGNMENT = 16  # every dimension of an FP8 GEMM must be a multiple of it
SPAN = 128  # elements of the summed dimension: block size on Hopper, and the emulation's partial sums
TABLE_ALIGNMENT = 4  # cuBLAS requires rows of a 128 x 128 table to be aligned to 16 bytes


@functools.cache
def fp8_hardware(device: torch.device) -> bool:
    """Whether `device` has FP8 GEMMs: CUDA compute capability 8.9 or later (compared by number, never by name)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def native_bf16(device: torch.device) -> bool:
    """Whether `device` has BF16 GEMMs; a CPU that emulates them is at least 4 times slower than in FP32.

    oneDNN accepts every x86 CPU with AVX-512, and emulates BF16 if that has no BF16 instructions. All CPUs with AMX have both.
    """
    if device.type != "cpu":
        return True
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return bool(torch.cpu._is_avx512_bf16_supported() if x86 else torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def blockwise_hardware(device: torch.device) -> bool:
    """Whether torch has GEMMs of 1 x 128 blocks by 128 x 128 and by 1 x 128 blocks on `device`: Hopper, compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def check_blockwise(device: torch.device) -> None:
    """Raise a ValueError if `device` supports blockwise GEMMs but this torch, or its CUDA version, is too old for them."""
    if not blockwise_hardware(device):
        return
    if TorchVersion(torch.__version__) < "2.9" or TorchVersion(torch.version.cuda or "0.0") < "12.9":
        raise ValueError(
            f"torch {torch.__version__} with CUDA {torch.version.cuda} has no blockwise FP8 GEMM on "
            f"{torch.cuda.get_device_name(device)}, which requires torch 2.9 or later with CUDA 12.9 or later; upgrade torch, or choose "
            "a recipe with one scale per tensor (O1 to O3)"
        )


@functools.cache
def warn_if_emulated(device: torch.device, columns: int | None = None) -> None:
    """Warn once per device and block size if a GPU has no FP8, or no GEMM for blocks of `columns`."""
    if device.type != "cuda" or (fp8_hardware(device) if columns is None else blockwise_hardware(device) and columns == SPAN):
        return
    major, minor = torch.cuda.get_device_capability(device)
    blocks = f"GEMM for FP8 blocks of {columns} here (Hopper, 9.0, has one for blocks of 128)"
    lacks, fix = (blocks, "choose blockwise on Hopper, or O1 to O3") if columns else ("FP8 (8.9 or later)", "train in BF16 (O0)")
    warnings.warn(
        f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no {lacks}: casts and scales are FP8's, but GEMMs "
        f"run in 16 or 32 bits on the dequantized values. Expect the same losses and no speedup; for speed {fix}",
        stacklevel=2,
    )


def _padded(x: torch.Tensor, columns: int = ALIGNMENT) -> torch.Tensor:
    """Zero-pad FP8 [M, K] to multiples of 16 rows and of `columns`; return `x` itself if it needs no padding."""
    rows, cols = -x.shape[0] % ALIGNMENT, -x.shape[1] % columns
    return F.pad(x.view(torch.uint8), (0, cols, 0, rows)).view(x.dtype) if rows or cols else x


@functools.cache
def _values(dtype: torch.dtype, wide: torch.dtype) -> torch.Tensor:
    """Return the 256 values of an FP8 dtype, by code."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(wide)


def _decode(x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Return `x.to(wide)`; on a CPU by a table lookup, 0.5 ms for 512K elements on one core where torch's conversion takes 3 ms."""
    if x.device.type != "cpu" or type(x) is not torch.Tensor:  # a fake tensor must not reach the table, which is kept
        return x.to(wide)
    return _values(x.dtype, wide).index_select(0, x.view(torch.uint8).reshape(-1).int()).view(x.shape)


def bf16_linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `x @ w.T + bias` with both operands in BF16 and gradients from the same operands.

    A CPU that only emulates BF16 multiplies the BF16 values in FP32 and rounds once, as tensor cores do.

    Args:
        x: [..., K] of any float dtype, which the result has.
        w: BF16 [N, K].
        bias: [N] or None.
    """
    with torch.autocast(x.device.type, enabled=False):
        rows = x.to(torch.bfloat16)
        inside = bias if bias is not None and x.dtype == torch.bfloat16 else None  # in the GEMM, before its result is rounded
        if native_bf16(x.device):
            y = F.linear(rows, w, None if inside is None else inside.to(torch.bfloat16))
        else:
            y = F.linear(rows.float(), w.float(), None if inside is None else inside.float()).to(torch.bfloat16)
        y = y.to(x.dtype)
        return y if bias is None or inside is not None else y + bias.to(y.dtype)


def emulated_mm(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Compute `a @ b.T` on the dequantized values, rounded once to `out_dtype`.

    FP8 values are exact in BF16 and the scales are powers of two. So a BF16 GEMM with FP32 accumulation, scaled afterwards, differs from
    the hardware only in the order of the sum.
    """
    wide = torch.bfloat16 if out_dtype == torch.bfloat16 and native_bf16(a.device) else torch.float32
    with torch._C._DisableAutocast():  # in FP16 sums of codes overflow
        return ((_decode(a, wide) @ _decode(b, wide).t()) * (a_scale_inv * b_scale_inv)).to(out_dtype)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool,
) -> torch.Tensor:
    """Compute `(a @ b.T) * a_scale_inv * b_scale_inv + bias`. Both operands are K-major, as Hopper's FP8 GEMM requires.

    Args:
        a: [M, K] FP8, row-major.
        b: [N, K] FP8, row-major; at most one of the two is E5M2.
        a_scale_inv, b_scale_inv: FP32, 0-dim.
        bias: [N] of `out_dtype`, or None.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        fast_accum: let the tensor cores keep partial sums at reduced precision (`msamp.numerics.accumulation`).

    Returns:
        [M, N] of `out_dtype`. Dimensions that are not multiples of 16 are padded internally.
    """
    if not fp8_hardware(a.device):
        if accumulation.like_hopper():
            out = accumulation.product(a, b, "fast" if fast_accum else "full") * (a_scale_inv * b_scale_inv)
            return (out if bias is None else out + bias).to(out_dtype)  # one rounding: cuBLAS adds the bias in FP32
        out = emulated_mm(a, b, a_scale_inv, b_scale_inv, out_dtype)
        return out if bias is None else out + bias
    M, N = a.shape[0], b.shape[0]
    if 0 in (M, N, a.shape[1]):  # cuBLAS rejects empty operands
        out = torch.zeros((M, N), dtype=out_dtype, device=a.device)
        return out if bias is None else out + bias
    inner_bias = bias if out_dtype != torch.float32 and N % ALIGNMENT == 0 else None  # cuBLAS does not support an FP32 bias
    out = torch._scaled_mm(
        _padded(a),
        _padded(b).t(),
        scale_a=a_scale_inv,
        scale_b=b_scale_inv,
        bias=inner_bias,
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
    )
    if out.shape != (M, N):
        out = out[:M, :N].contiguous()
    return out if bias is None or inner_bias is not None else out + bias


def scaled_mm_(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    fast_accum: bool,
) -> None:
    """Write `scaled_mm` to `out`: contiguous [M, N] BF16, FP16 or FP32, such as some rows of a larger product."""
    unpadded = not any(size == 0 or size % ALIGNMENT for size in (*a.shape, b.shape[0]))
    if not (unpadded and fp8_hardware(a.device) and (bias is None or out.dtype != torch.float32)):
        out.copy_(scaled_mm(a, b, a_scale_inv, b_scale_inv, bias, out.dtype, fast_accum=fast_accum))
        return
    torch.ops.aten._scaled_mm.out(a, b.t(), a_scale_inv, b_scale_inv, bias, out_dtype=out.dtype, use_fast_accum=fast_accum, out=out)


def have_product(a: Block, b: Block) -> bool:
    """Whether `block_scaled_mm` supports these blocks: both operands' scales are constant over the same spans of the sum."""
    return a.rows == 1 and b.rows in (1, b.columns) and a.columns == b.columns and not SPAN % a.columns


def check_blocks(a: Block, b: Block) -> None:
    """Raise a ValueError if operands with these blocks cannot be multiplied."""
    if not have_product(a, b):
        raise ValueError(
            f"{a} by {b} is not supported; use 1 x n for the left operand and 1 x n or n x n for the right one, along the summed "
            f"dimension, with n a divisor of {SPAN}, such as 1 x 128 by 128 x 128"
        )


def emulated_block_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    a_block: Block,
    b_block: Block,
) -> torch.Tensor:
    """Compute `a @ b.T` on the dequantized FP32 values, rounded once to `out_dtype`.

    Partial sums over 128 elements are accumulated in FP32 from the first to the last, as Hopper accumulates its blocks. So emulation and
    hardware differ in the order of the sum within a span, in the roughly 13 bits that tensor cores keep there, and with FP32 scales in the
    rounding of code * scale_inv, 2^-24. Together this is about 1e-3 of the norm of an FP32 result, as in tensorwise GEMMs, plus one
    rounding for a BF16 result. With E8M0 scales and a BF16 result, on devices with BF16 GEMMs, the values are multiplied in BF16, which
    represents them exactly down to 2^-133, and the sum is in the order of torch's GEMM.
    """
    exact = a_scale_inv.dtype == b_scale_inv.dtype == torch.uint8
    wide = torch.bfloat16 if exact and out_dtype == torch.bfloat16 and native_bf16(a.device) else torch.float32
    left, right = (
        (_decode(x, torch.float32) * block.spread(values(table), x.shape)).to(wide)
        for x, table, block in ((a, a_scale_inv, a_block), (b, b_scale_inv, b_block))
    )
    if wide == torch.bfloat16:
        return left @ right.t()
    out = left.new_zeros((a.shape[0], b.shape[0]))
    for at in range(0, a.shape[1], SPAN):
        out.addmm_(left[:, at : at + SPAN], right[:, at : at + SPAN].t())
    return out.to(out_dtype)


def _outer_major(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Return FP32 [R, blocks] in cuBLAS's layout for blocks of one row: [rows, blocks] with strides (1, rows), padded with ones."""
    by_block = table.t()
    return F.pad(by_block, (0, rows - table.shape[0]), value=1.0).t() if rows > table.shape[0] else by_block.contiguous().t()


def block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    a_block: Sequence[int],
    b_block: Sequence[int],
) -> torch.Tensor:
    """Compute `a @ b.T + bias` for operands with blocks along the summed dimension, as returned by `msamp.kernels.ops.block_cast`.

    Hopper multiplies 1 x 128 blocks by 128 x 128 and by 1 x 128 blocks with FP32 scales. Other blocks, E8M0 scales and other devices are
    emulated (`emulated_block_mm`), and `warn_if_emulated` warns about it. Blocks have no fast accumulation.

    Args:
        a: [M, K] FP8, row-major.
        b: [N, K] FP8, row-major; at most one of the two is E5M2.
        a_scale_inv: [M, ceil(K / n)], FP32, or E8M0 as uint8. A column-major table is read without a copy.
        b_scale_inv: [ceil(N / rows), ceil(K / n)], likewise; row-major for n x n blocks.
        bias: [N] of `out_dtype`, or None.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        a_block: (1, n), n a divisor of 128.
        b_block: (1, n) or (n, n).

    Returns:
        [M, N] of `out_dtype`. Internally, rows are padded to multiples of 16 and the summed dimension to multiples of 128.

    Raises:
        ValueError: if blocks cannot be multiplied, or a table has another shape.
    """
    left, right = Block(*a_block), Block(*b_block)
    check_blocks(left, right)
    for name, x, table, block in (("a", a, a_scale_inv, left), ("b", b, b_scale_inv, right)):
        if tuple(table.shape) != block.scales_shape(x.shape):
            raise ValueError(
                f"{name}_scale_inv is {tuple(table.shape)}; it must be {block.scales_shape(x.shape)} for {tuple(x.shape)} in {block}"
            )
    fp32 = a_scale_inv.dtype == b_scale_inv.dtype == torch.float32
    if fp32 and left.columns == SPAN and blockwise_hardware(a.device) and a.numel() and b.numel():
        inner_bias = bias if out_dtype != torch.float32 and b.shape[0] % ALIGNMENT == 0 else None
        M, N = a.shape[0], b.shape[0]
        a, b = _padded(a, SPAN), _padded(b, SPAN)
        by_rows = right.rows == 1
        if not by_rows and b_scale_inv.shape[1] % TABLE_ALIGNMENT:
            # torch requires such a table without padding, but cuBLAS with it. The same scales as blocks of one row need no padding.
            b_scale_inv, by_rows = b_scale_inv.repeat_interleave(right.rows, 0)[:N], True
        table = _outer_major(b_scale_inv, b.shape[0]) if by_rows else b_scale_inv.contiguous()
        # cuBLAS does not support fast accumulation for blocks.
        tables = {"scale_a": _outer_major(a_scale_inv, a.shape[0]), "scale_b": table.t()}
        out = torch._scaled_mm(a, b.t(), **tables, bias=inner_bias, out_dtype=out_dtype, use_fast_accum=False)
        out = out[:M, :N].contiguous() if out.shape != (M, N) else out
        return out if bias is None or inner_bias is not None else out + bias
    out = emulated_block_mm(a, b, a_scale_inv, b_scale_inv, out_dtype, left, right)
    return out if bias is None else out + bias
