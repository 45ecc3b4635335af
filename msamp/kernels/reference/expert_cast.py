"""Cast the weights of all experts to FP8 in both layouts, with one scale per expert."""

import torch

from msamp.kernels.reference.cast import cast
from msamp.numerics.formats import of_dtype
from msamp.numerics.scaling import inverse, scale_from_amax


def check_weights(payload: torch.Tensor, stored: torch.Tensor) -> None:
    """Raise a ValueError unless `payload` is [experts, N, K] with N a multiple of 4, and `stored` FP32 with one scale_inv per expert. For
    other N ptxas of CUDA 12.8 miscompiles the kernel, as `expert_swiglu.check_gradient_cast` says."""
    if payload.ndim != 3 or not payload.is_floating_point():
        raise ValueError(f"weights are {payload.dtype} {tuple(payload.shape)}; they must be floating-point [experts, N, K]")
    if payload.shape[1] % 4:
        raise ValueError(f"weights have {payload.shape[1]} outputs; their transposes need a multiple of 4")
    if stored.dtype != torch.float32 or tuple(stored.shape) != (payload.shape[0],):
        raise ValueError(f"scale_inv is {stored.dtype} {tuple(stored.shape)}; it must be torch.float32 ({payload.shape[0]},)")


def expert_cast(payload: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the FP8 weights of all experts, their transposes, and one scale_inv per expert, from the weights as they are stored.

    Each expert's scale comes from its own amax, as `weight_scales` computes it for one weight. Forward multiplies by the weights and
    grad_input by the transposes; both are cast once per step.

    Args:
        payload: [E, N, K], contiguous, FP32, BF16, FP16, or `dtype`, in which case its codes are the weights.
        stored: FP32 [E]: payload * stored is the weight.
        dtype: an FP8 dtype.

    Returns:
        [E, N, K] and [E, K, N] of `dtype`; FP32 [E]. The first is empty if the payload has that dtype: use the payload.

    Raises:
        ValueError: if shapes or dtypes do not fit.
    """
    check_weights(payload, stored)
    if payload.dtype == dtype:
        return payload.new_empty(0), payload.view(torch.uint8).transpose(1, 2).contiguous().view(dtype), stored.clone()
    amaxes = payload.abs().flatten(1).amax(1).float() if payload.numel() else stored.new_zeros(payload.shape[0])
    scales = scale_from_amax(torch.where(amaxes.isnan(), float("inf"), amaxes) * stored, of_dtype(dtype).max)
    cast_all = torch.empty(payload.shape, dtype=torch.uint8, device=payload.device)
    for e, multiplier in enumerate(scales * stored):
        cast_all[e] = cast(payload[e], multiplier, dtype).view(torch.uint8)
    return cast_all.view(dtype), cast_all.transpose(1, 2).contiguous().view(dtype), inverse(scales)
