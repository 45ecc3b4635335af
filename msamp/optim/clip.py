"""Gradient norm and clipping over plain and FP8 gradients.

The norm must not depend on how tensors are cut and spread over ranks, to the bit: it decides whether a step is skipped
and scales every update. So a tensor's squares are added as integers, which any order and any cut adds up to the same,
and tensors are added in FP64 in the order of their index.
"""

from collections.abc import Iterable, Sequence

import torch

from msamp.kernels import ops
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor

_BITS = 57  # of 63: scale_from_amax leaves up to two bits above 1 where its exponent is clamped, and their squares four


def tensor_amaxes(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """FP32 [len(xs)] amax of the values of plain tensors or ScalingTensors; +inf where they are not finite."""
    scaled = [x for x in xs if isinstance(x, ScalingTensor)]
    plain = [x for x in xs if not isinstance(x, ScalingTensor)]
    wide = [x for x in scaled if x.payload.itemsize > 1]
    narrow = [x for x in scaled if x.payload.itemsize == 1]
    found = dict(zip(map(id, plain), TENSORWISE.amaxes(plain).unbind(), strict=True))
    for members, amax in ((wide, TENSORWISE.amaxes([x.payload for x in wide])), (narrow, _fp8_amaxes([x.payload for x in narrow]))):
        if members:
            amax = amax * torch.stack([x.scale_inv for x in members]).abs()
            found |= zip(map(id, members), amax.unbind(), strict=True)
    amaxes = torch.stack([found[id(x)] for x in xs])
    return amaxes.masked_fill(amaxes.isnan(), float("inf"))


def _fp8_amaxes(payloads: Sequence[torch.Tensor]) -> torch.Tensor:
    # Without their sign bit FP8's bit patterns are in the order of the magnitudes: no copy in FP32.
    largest = [
        (x.view(torch.uint8) & 0x7F).max().view(x.dtype).float() if x.numel() else x.new_zeros((), dtype=torch.float32) for x in payloads
    ]
    return torch.stack(largest) if largest else torch.zeros(0)


def square_sum(g: torch.Tensor, scale: torch.Tensor, numel: int) -> torch.Tensor:
    """Sum of squares of some rows of a gradient, in units that all its rows share: int64 [2], see `kernels.reference.square_sum`.

    Args:
        g: plain or a ScalingTensor, any shape.
        scale: FP64 0-dim `unit_scale` of the amax of the whole tensor.
        numel: elements of the whole tensor.
    """
    if isinstance(g, ScalingTensor):
        return ops.square_sum(g.payload, scale * g.scale_inv.double(), _units(numel))
    return ops.square_sum(g.detach(), scale, _units(numel))


def unit_scale(amax: torch.Tensor) -> torch.Tensor:
    """FP64 powers of two that bring FP32 `amax` next to 1."""
    return scale_from_amax(amax, 1.0).double()


def norms_from_square_sums(totals: torch.Tensor, amaxes: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
    """FP64 [n] L2 norms of tensors from the int64 [n, 2] sums of their `square_sum`s; NaN where an amax is not finite."""
    units = torch.tensor([_units(numel) for numel in numels], dtype=torch.float64).to(totals.device, non_blocking=True)
    norms = ((totals[:, 0].double() + totals[:, 1].double() * 2.0**-30) / units).sqrt() / unit_scale(amaxes)
    return norms.masked_fill(~amaxes.isfinite(), float("nan"))


def _units(numel: int) -> float:
    return 2.0 ** min(46, _BITS - numel.bit_length())


def grad_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Global L2 norm of whole gradients, FP64 0-dim."""
    gs = list(gradients)
    if not gs:
        return torch.zeros((), dtype=torch.float64)
    amaxes = tensor_amaxes(gs)
    totals = torch.stack([square_sum(g, scale, g.numel()) for g, scale in zip(gs, unit_scale(amaxes), strict=True)])
    return torch.linalg.vector_norm(norms_from_square_sums(totals, amaxes, [g.numel() for g in gs]))


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
