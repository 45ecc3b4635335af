"""The FP8 GEMM: `torch._scaled_mm` where the hardware has FP8, the same product of the dequantised operands elsewhere."""

import functools
import warnings

import torch
import torch.nn.functional as F

ALIGNMENT = 16  # of every dimension of an FP8 GEMM


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
    """Warn, once a device, where a GPU has no FP8: what runs instead."""
    if device.type == "cuda" and not fp8_hardware(device):
        major, minor = torch.cuda.get_device_capability(device)
        warnings.warn(
            f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no FP8 (that needs 8.9 or later): "
            "casts and scales are those of FP8, but the GEMMs run in 16 or 32 bits on the dequantised values, so expect the same losses "
            "and no speed-up; for speed on this GPU train in BF16 (O0)",
            stacklevel=2,
        )


def _padded(x: torch.Tensor) -> torch.Tensor:
    """FP8 [M, K] with both dimensions zero-padded to multiples of 16; `x` itself where they are."""
    rows, cols = -x.shape[0] % ALIGNMENT, -x.shape[1] % ALIGNMENT
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
        fast_accum: let the tensor cores keep partial sums at reduced precision (output only; gradients want the full sum).

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
