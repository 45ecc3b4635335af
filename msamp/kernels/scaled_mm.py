"""The FP8 GEMM: `torch._scaled_mm` where the hardware has it, the same product of the dequantised operands elsewhere.

With one scale an operand (`scaled_mm`), or one a block (`block_scaled_mm`).
"""

import functools
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from msamp.numerics.block_scale import values
from msamp.numerics.granularity import Block

ALIGNMENT = 16  # of every dimension of an FP8 GEMM
SPAN = 128  # of the summed dimension: columns of the blocks that Hopper multiplies, and what the emulation adds up at a time
TABLE_ALIGNMENT = 4  # cuBLAS reads the rows of a 128 x 128 table at multiples of 16 bytes
BLOCKWISE_TORCH, BLOCKWISE_CUDA = (2, 9), (12, 9)  # the first that have the product


@functools.cache
def fp8_hardware(device: torch.device) -> bool:
    """True where `device` multiplies FP8 itself: CUDA compute capability 8.9 or later (asked by number, never by name)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def native_bf16(device: torch.device) -> bool:
    """True where `device` multiplies BF16 itself; a CPU that emulates it is tens of times slower than in FP32."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def warn_if_emulated(device: torch.device) -> None:
    """Warn, once a device, where a GPU has no FP8, and say what runs instead."""
    if device.type == "cuda" and not fp8_hardware(device):
        major, minor = torch.cuda.get_device_capability(device)
        warnings.warn(
            f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no FP8 (that needs 8.9 or later): "
            "casts and scales are those of FP8, but the GEMMs run in 16 or 32 bits on the dequantised values, so expect the same losses "
            "and no speed-up; for speed on this GPU train in BF16 (O0)",
            stacklevel=2,
        )


@functools.cache
def blockwise_hardware(device: torch.device) -> bool:
    """True where torch multiplies blocks of 1 x 128 by 128 x 128 and by 1 x 128 on `device` itself: Hopper, compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def check_blockwise(device: torch.device) -> None:
    """ValueError where `device` would multiply blocks itself and this torch cannot: too old, or built with too old a CUDA."""
    if not blockwise_hardware(device):
        return
    torch_version, cuda = _version(torch.__version__), _version(torch.version.cuda or "0.0")
    if torch_version < BLOCKWISE_TORCH or cuda < BLOCKWISE_CUDA:
        raise ValueError(
            f"torch {torch.__version__} with CUDA {torch.version.cuda} has no blockwise FP8 product on "
            f"{torch.cuda.get_device_name(device)}: that takes torch 2.9 or later, built with CUDA 12.9 or later; upgrade torch, or choose "
            "a recipe with one scale a tensor (O1 to O3)"
        )


def _version(text: str) -> tuple[int, int]:
    """Major and minor number of `2.11.0+cu130`."""
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


@functools.cache
def warn_if_blocks_emulated(device: torch.device, columns: int) -> None:
    """Warn, once a device and block, where a GPU does not multiply blocks of `columns` itself, and say what runs instead."""
    if device.type == "cuda" and not (blockwise_hardware(device) and columns == SPAN):
        major, minor = torch.cuda.get_device_capability(device)
        warnings.warn(
            f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) multiplies no FP8 blocks of {columns} here (blocks "
            "of 128 run on Hopper, 9.0): casts and scales are exact, but the GEMMs run in 16 or 32 bits on the dequantised values, so "
            "expect the same losses and no speed-up; for speed choose blockwise on Hopper, or O1 to O3",
            stacklevel=2,
        )


def _padded(x: torch.Tensor, columns: int = ALIGNMENT) -> torch.Tensor:
    """FP8 [M, K] zero-padded to multiples of 16 rows and of `columns`; `x` itself where they are."""
    rows, cols = -x.shape[0] % ALIGNMENT, -x.shape[1] % columns
    return F.pad(x.view(torch.uint8), (0, cols, 0, rows)).view(x.dtype) if rows or cols else x


@functools.cache
def _values(dtype: torch.dtype, wide: torch.dtype) -> torch.Tensor:
    """The 256 values of an FP8 dtype by code."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(wide)


def _decode(x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """`x.to(wide)`; on a CPU by table, which took 0.33 ms where torch's own conversion took 1.6 (512K elements, one core)."""
    if x.device.type != "cpu":
        return x.to(wide)
    return _values(x.dtype, wide)[x.view(torch.uint8).int()]


def emulated_mm(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """`a @ b.T` of FP8 payloads on the values they stand for, rounded once to `out_dtype`.

    FP8 values are exact in BF16 and the scales are powers of two, so BF16 operands with FP32 accumulation and the scale
    applied behind give what the hardware gives but for the order of the sum.
    """
    wide = torch.bfloat16 if out_dtype == torch.bfloat16 and native_bf16(a.device) else torch.float32
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
    """`(a @ b.T) * a_scale_inv * b_scale_inv + bias`: both operands K-major, as Hopper's FP8 GEMM wants them.

    Args:
        a: [M, K] FP8, row-major.
        b: [N, K] FP8, row-major; at most one of the two is E5M2.
        a_scale_inv, b_scale_inv: FP32, 0-dim.
        bias: [N] of `out_dtype`, or None.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        fast_accum: let the tensor cores keep partial sums at reduced precision (by default for outputs alone).

    Returns:
        [M, N] of `out_dtype`. Dimensions that are not multiples of 16 are padded inside.
    """
    if not fp8_hardware(a.device):
        out = emulated_mm(a, b, a_scale_inv, b_scale_inv, out_dtype)
        return out if bias is None else out + bias
    M, N = a.shape[0], b.shape[0]
    if 0 in (M, N, a.shape[1]):  # cuBLAS takes no empty operand
        out = torch.zeros((M, N), dtype=out_dtype, device=a.device)
        return out if bias is None else out + bias
    inner_bias = bias if out_dtype != torch.float32 and N % ALIGNMENT == 0 else None  # cuBLAS adds no FP32 bias
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


def have_product(a: Block, b: Block) -> bool:
    """Whether the scales of operands in these blocks leave the sum together, as `block_scaled_mm` wants it."""
    return a.rows == 1 and b.rows in (1, b.columns) and a.columns == b.columns and not SPAN % a.columns


def check_blocks(a: Block, b: Block) -> None:
    """ValueError for operands with scales that do not leave the sum together."""
    if not have_product(a, b):
        raise ValueError(
            f"{a} by {b} is no blockwise product; the left operand is in 1 x n blocks and the right one in 1 x n or n x n, along the "
            f"summed dimension, with n a divisor of {SPAN}: such as 1 x 128 by 128 x 128"
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
    """`a @ b.T` of the FP32 values that codes and scales stand for, rounded once to `out_dtype`.

    The sum is FP32's, in spans of 128 of the summed dimension from the first to the last, as Hopper adds up its blocks. So emulation and
    hardware differ in the order of a sum within a span, in the 13 or so bits that tensor cores keep there, and with FP32 scales in the
    rounding of code * scale_inv, 2^-24: in all about 1e-3 of the norm of the result in FP32, as tensorwise products do, and one rounding
    of BF16 on top. With E8M0 scales and a BF16 result, on devices that have BF16, the values are multiplied in BF16, which holds them
    exactly down to 2^-133, and the order of the sum is that of torch's product.
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
    """FP32 [R, blocks] as cuBLAS reads blocks of one row, [rows, blocks] with strides (1, rows), filled up with ones."""
    by_block = table.t()
    return F.pad(by_block, (0, rows - table.shape[0]), value=1.0).t() if rows > table.shape[0] else by_block.contiguous().t()


def _hopper_block_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    b_rows: int,
) -> torch.Tensor:
    """The product of 1 x 128 blocks of `a` by 1 x 128 or 128 x 128 blocks of `b` by cuBLAS, which accumulates blocks in FP32."""
    M, N = a.shape[0], b.shape[0]
    a, b = _padded(a, SPAN), _padded(b, SPAN)
    if b_rows > 1 and b_scale_inv.shape[1] % TABLE_ALIGNMENT:
        # torch wants such a table without padding and cuBLAS with it. In blocks of one row it says the same and needs none.
        b_scale_inv, b_rows = b_scale_inv.repeat_interleave(b_rows, 0)[:N], 1
    right = _outer_major(b_scale_inv, b.shape[0]) if b_rows == 1 else b_scale_inv.contiguous()
    out = torch._scaled_mm(
        a,
        b.t(),
        scale_a=_outer_major(a_scale_inv, a.shape[0]),
        scale_b=right.t(),
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=False,  # cuBLAS has none for blocks
    )
    return out[:M, :N].contiguous() if out.shape != (M, N) else out


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
    """`a @ b.T + bias` of operands in blocks along the summed dimension, as `msamp.kernels.ops.block_cast` leaves them.

    Hopper multiplies 1 x 128 by 128 x 128 and by 1 x 128 with FP32 scales itself; other blocks, E8M0 scales and other devices are
    emulated (`emulated_block_mm`), which `warn_if_blocks_emulated` says. There is no fast accumulation of blocks.

    Args:
        a: [M, K] FP8, row-major.
        b: [N, K] FP8, row-major; at most one of the two is E5M2.
        a_scale_inv: [M, ceil(K / n)], FP32, or E8M0 as uint8. Column-major it is read as it stands.
        b_scale_inv: [ceil(N / rows), ceil(K / n)] likewise; of n x n blocks row-major.
        bias: [N] of `out_dtype`, or None.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        a_block: (1, n), n a divisor of 128.
        b_block: (1, n) or (n, n).

    Returns:
        [M, N] of `out_dtype`. Rows are padded inside to multiples of 16, and the summed dimension to multiples of 128.

    Raises:
        ValueError: for blocks that have no product, or tables of another shape.
    """
    left, right = Block(*a_block), Block(*b_block)
    check_blocks(left, right)
    for name, x, table, block in (("a", a, a_scale_inv, left), ("b", b, b_scale_inv, right)):
        if tuple(table.shape) != block.scales_shape(x.shape):
            raise ValueError(f"{name}_scale_inv is {tuple(table.shape)}; {tuple(x.shape)} in {block} has {block.scales_shape(x.shape)}")
    fp32 = a_scale_inv.dtype == b_scale_inv.dtype == torch.float32
    if fp32 and left.columns == SPAN and blockwise_hardware(a.device) and a.numel() and b.numel():
        inner_bias = bias if out_dtype != torch.float32 and b.shape[0] % ALIGNMENT == 0 else None
        out = _hopper_block_mm(a, b, a_scale_inv, b_scale_inv, inner_bias, out_dtype, right.rows)
        return out if bias is None or inner_bias is not None else out + bias
    out = emulated_block_mm(a, b, a_scale_inv, b_scale_inv, out_dtype, left, right)
    return out if bias is None else out + bias
