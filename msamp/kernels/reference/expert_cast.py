"""Cast the weights of all experts to FP8 in both layouts, with one scale per expert."""

import torch

from msamp.kernels.reference.cast import cast
from msamp.kernels.reference.cast_transpose import check_rows
from msamp.numerics.formats import of_dtype
from msamp.numerics.scaling import inverse, scale_from_amax


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
        ValueError: if N is not a multiple of 4.
    """
    check_rows(payload.shape[1])
    if payload.dtype == dtype:
        return payload.new_empty(0), payload.view(torch.uint8).transpose(1, 2).contiguous().view(dtype), stored.clone()
    amaxes = payload.abs().flatten(1).amax(1).float() if payload.numel() else stored.new_zeros(payload.shape[0])
    scales = scale_from_amax(torch.where(amaxes.isnan(), float("inf"), amaxes) * stored, of_dtype(dtype).max)
    cast_all = torch.empty(payload.shape, dtype=torch.uint8, device=payload.device)
    for e, multiplier in enumerate(scales * stored):
        cast_all[e] = cast(payload[e], multiplier, dtype).view(torch.uint8)
    return cast_all.view(dtype), cast_all.transpose(1, 2).contiguous().view(dtype), inverse(scales)
