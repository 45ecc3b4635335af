"""Gradient norm and clipping over plain and FP8 gradients."""

from collections.abc import Iterable

import torch

from msamp.numerics.tensor import ScalingTensor


def tensor_norm(g: torch.Tensor) -> torch.Tensor:
    """FP64 0-dim L2 norm of one gradient; of an FP8 one, that of its payload times scale_inv (NaN where it is poisoned)."""
    if isinstance(g, ScalingTensor):
        return torch.linalg.vector_norm(g.payload.float(), dtype=torch.float64) * g.scale_inv.double().abs()
    return torch.linalg.vector_norm(g, dtype=torch.float64)


def grad_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Global L2 norm, FP64 0-dim: per-tensor norms in FP64, summed in the order given.

    The sum is by tensor index, so it does not depend on how tensors are spread over ranks.
    """
    norms = [tensor_norm(g) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)


def check_max_norm(max_norm: float) -> None:
    """ValueError for a clipping norm that is not positive."""
    if not max_norm > 0:
        raise ValueError(f"clipping norm is {max_norm}; it must be greater than 0 (leave it out to clip nothing)")


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)), FP32 0-dim; ValueError for a `max_norm` that is not positive."""
    check_max_norm(max_norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0).float()


def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Like `torch.nn.utils.clip_grad_norm_`, for plain and FP8 gradients together.

    The coefficient folds into an FP8 gradient's scale_inv, so clipping rounds no element of it.

    Returns:
        The norm before clipping, FP64 0-dim.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = grad_norm(gradients)
    coefficient = clip_coefficient(norm, max_norm)
    for g in gradients:
        g.mul_(coefficient.to(g.device))
    return norm
