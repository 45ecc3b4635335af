"""Gradient norm and clipping over plain and FP8 gradients.

The norm must not depend on how tensors are cut and spread over ranks, to the bit: it decides whether a step is skipped
and scales every update. So a tensor's squares are added as integers, which any order and any cut adds up to the same,
and tensors are added in FP64 in the order of their index.
"""

from collections.abc import Iterable, Sequence

import torch

from msamp.kernels import ops
from msamp.kernels.reference.grad_stats import PAYLOAD_UNITS, carried
from msamp.kernels.tables import Tables
from msamp.numerics.tensor import ScalingTensor

_BITS = 57  # of 63: scale_from_amax leaves up to two bits above 1 where its exponent is clamped, and their squares four


def contiguous(g: torch.Tensor) -> torch.Tensor:
    """Contiguous `g`, detached; no copy if it is contiguous."""
    if isinstance(g, ScalingTensor):
        return g if g.payload.is_contiguous() else ScalingTensor(g.payload.contiguous(), g.scale_inv, g.dtype)
    return g.detach().contiguous()


def scaled_first(gs: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Places of the ScalingTensors, and of the plain tensors."""
    kinds = [isinstance(g, ScalingTensor) for g in gs]
    return [i for i, scaled in enumerate(kinds) if scaled], [i for i, scaled in enumerate(kinds) if not scaled]


def first_pass(tables: Tables, scaled: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of one read of gradients: `grad_stats` of the scaled ones, then the amaxes of the plain ones.

    Returns:
        FP32 [2, scaled + plain]: amaxes and scale_invs.
        int64 [scaled, 2]: the scaled ones' sums of squares.
    """
    sums = torch.zeros(0, 2, dtype=torch.int64, device=tables.device)
    found = []
    if scaled:
        stats, sums = _of_scaled(tables, scaled)
        found.append(stats)
    if plain:
        found.append(ops.grad_stats(tables, plain, squares=False)[0])
    return torch.cat(found, 1), sums


def _of_scaled(tables: Tables, gs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`grad_stats` of scaled gradients, which reads those without a tally."""
    tallies = [g.tally if isinstance(g, ScalingTensor) else None for g in gs]
    told = [i for i, tally in enumerate(tallies) if tally is not None]
    if not told:
        return ops.grad_stats(tables, gs)
    largest, whole, rest = torch.stack([tallies[i] for i in told]).unbind(1)  # type: ignore[misc]
    scale_invs = torch.stack([gs[i].scale_inv for i in told])  # type: ignore[attr-defined]
    amaxes = largest.to(torch.int32).view(torch.float32) * scale_invs.abs()
    stats = torch.stack([amaxes.masked_fill(amaxes.isnan(), float("inf")), scale_invs.masked_fill(scale_invs.isnan(), 0.0)])
    sums = carried(torch.stack([whole, rest], 1))
    if len(told) == len(gs):
        return stats, sums
    others = [i for i, tally in enumerate(tallies) if tally is None]
    more_stats, more_sums = ops.grad_stats(tables, [gs[i] for i in others])
    order = [*told, *others]
    back = tables.send(("order of told", *told), sorted(range(len(gs)), key=order.__getitem__))
    return torch.cat([stats, more_stats], 1).index_select(1, back), torch.cat([sums, more_sums]).index_select(0, back)


def second_pass(tables: Tables, plain: Sequence[torch.Tensor], amaxes: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
    """int64 [plain, 2] sums of the squares of plain gradients, which may be rows of larger tensors.

    Args:
        amaxes: FP32 [plain], of the whole tensors.
        numels: elements of the whole tensors.
    """
    return ops.grad_stats(tables, plain, unit_scale(amaxes), [units(numel) for numel in numels])[1]


def unit_scale(amax: torch.Tensor) -> torch.Tensor:
    """FP64 powers of two that bring FP32 `amax` next to 1."""
    return ops.scale_from_amax(amax, 1.0, None, 1.0).double()


def units(numel: int) -> int:
    """Fixed-point resolution of the sum of squares of a plain gradient: parts of 1, chosen so that `numel` terms fit in 57 bits."""
    return 2 ** max(0, min(46, _BITS - numel.bit_length()))


def norms_from_square_sums(totals: torch.Tensor, amaxes: torch.Tensor, scale_invs: torch.Tensor, plain_units: torch.Tensor) -> torch.Tensor:
    """FP64 [n] L2 norms of whole tensors; NaN where an amax is not finite.

    Args:
        totals: int64 [n, 2], the added sums of squares of all rows.
        amaxes: FP32 [n].
        scale_invs: FP32 [n], 0 for plain gradients.
        plain_units: FP64 [n], `units` of their elements.
    """
    whole, rest = carried(totals).double().unbind(1)
    scaled = scale_invs > 0
    parts = plain_units.masked_fill(scaled, PAYLOAD_UNITS)
    worth = torch.where(scaled, scale_invs.double(), unit_scale(amaxes).reciprocal())
    norms = ((whole + rest * 2.0**-30) / parts).sqrt() * worth
    return norms.masked_fill(~amaxes.isfinite(), float("nan"))


def grad_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Global L2 norm of whole gradients, FP64 0-dim."""
    gs = list(gradients)
    if not gs:
        return torch.zeros((), dtype=torch.float64)
    tables = Tables(gs[0].device)
    scaled, plain = ([contiguous(gs[i]) for i in places] for places in scaled_first(gs))
    stats, sums = first_pass(tables, scaled, plain)
    numels = [g.numel() for g in scaled + plain]
    if plain:
        sums = torch.cat([sums, second_pass(tables, plain, stats[0, len(scaled) :], numels[len(scaled) :])])
    parts = tables.send("units", [float(units(numel)) for numel in numels], torch.float64)
    return torch.linalg.vector_norm(norms_from_square_sums(sums, stats[0], stats[1], parts))


def check_max_norm(max_norm: float) -> None:
    """ValueError for a clipping norm that is not positive."""
    if not max_norm > 0:
        raise ValueError(f"clipping norm is {max_norm}; it must be greater than 0 (leave it out to clip nothing)")


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)), FP32 0-dim; ValueError for a `max_norm` that is not positive."""
    check_max_norm(max_norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0).float()


def clip_(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip whole gradients, plain and FP8 together, in place, to a global norm.

    The coefficient folds into an FP8 gradient's scale_inv, so clipping rounds no element of it.

    Returns:
        The norm before clipping, FP64 0-dim.
    """
    norm = grad_norm(gradients)
    coefficient = clip_coefficient(norm, max_norm)
    for g in gradients:
        g.mul_(coefficient.to(g.device))
    return norm
