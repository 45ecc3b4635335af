"""SwiGLU of a mixture of experts, times the router's probability, cast to the operand of the next grouped GEMM, and its gradients."""

import torch

from msamp.kernels.reference.activate import _activation, _derivative
from msamp.kernels.reference.cast_transpose import _store, check_rows
from msamp.numerics.formats import of_dtype
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse


def expert_swiglu(
    y: torch.Tensor,
    probs: torch.Tensor,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    end: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `probs * silu(gate) * up`, in the format of the second linear layer's input. That layer is linear in its input, so the sum
    over a token's experts is weighted here, where it costs no pass over memory.

    Args:
        y: [R, 2F] BF16, FP16 or FP32: gate, then up.
        probs: FP32 [R], the router's probability of each row.
        scale: FP32, 0-dim, a power of two; None uses a just-in-time scale from the result's amax.
        amax_slot: FP32, 0-dim, raised in place to the amax of the result (+inf if not finite); None does not measure it.
        dtype: of the result; a wide dtype gives a plain result without scale and amax.
        end: int32 [1]: rows from this number on have probability 0, and are undefined in the result (`permute`).

    Returns:
        [R, F] of `dtype`; scale_inv FP32, 0-dim, NaN if the result is not finite (empty with a wide `dtype`).
    """
    a, _, scale_inv, _ = _store(_weighted(y, probs), scale, amax_slot, dtype, False, False)
    return a, scale_inv


def expert_swiglu_backward(
    grad_a: torch.Tensor,
    y: torch.Tensor,
    probs: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_dtype: torch.dtype,
    scale: torch.Tensor | None,
    amax_slot: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    end: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of `expert_swiglu`, cast for the grouped GEMMs, and its transposed result, which forward did not save.

    Args:
        grad_a: [R, F] BF16, FP16 or FP32.
        y, probs: the inputs of `expert_swiglu`.
        a_scale_inv: as returned by `expert_swiglu`.
        a_dtype: the FP8 dtype of `expert_swiglu`.
        scale: of the gradient, FP32, 0-dim, a power of two; None uses a just-in-time scale.
        amax_slot: FP32, 0-dim, raised in place to the amax of the gradient (+inf if not finite); None does not measure it.
        dtype: FP8, of the gradient.
        end: as in `expert_swiglu`; the columns of the transposes are undefined too.

    Returns:
        Gradient g [R, 2F] and its transpose [2F, R], of `dtype`; scale_inv FP32, 0-dim, NaN if g is not finite; the transpose [F, R] of
        `expert_swiglu`'s result, with the same codes; parts of the gradient of `probs`, FP32 [parts, R], to be added up.

    Raises:
        ValueError: if R is not a multiple of 4.
    """
    check_rows(y.shape[0])
    exact = expert_swiglu_gradient(grad_a, y, probs)
    g, g_t, scale_inv, _ = _store(exact, scale, amax_slot, dtype, True, False)
    a_t = quantize(_weighted(y, probs), inverse(a_scale_inv), of_dtype(a_dtype)).t().contiguous()
    return g, g_t, scale_inv, a_t, (grad_a.float() * _activation(y, "swiglu")).sum(1).unsqueeze(0)


def expert_swiglu_gradient(grad_a: torch.Tensor, y: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `y` before the cast of `expert_swiglu_backward`, FP32 [R, 2F]: for statistics only."""
    return _derivative(grad_a.float() * probs.unsqueeze(1), y, "swiglu")


def _weighted(y: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    return _activation(y, "swiglu") * probs.unsqueeze(1)
