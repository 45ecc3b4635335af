"""Gradient norm and clipping for plain and FP8 gradients.

The norm must be the same, bit for bit, however tensors are sharded over ranks, since it decides whether a step is skipped and scales every
update. So the squares of a tensor are summed as integers, which is independent of order and sharding, and the tensors are summed in FP64 in
the order of their index.
"""

from collections.abc import Iterable, Sequence

import torch

from msamp.kernels import ops
from msamp.kernels.reference.grad_stats import PAYLOAD_UNITS, carried
from msamp.kernels.tables import Tables
from msamp.numerics.tensor import ScalingTensor, contiguous

_BITS = 57  # bits that a sum may use of 63: scaled values may reach 2^2 when scale_from_amax clamps its exponent, and their squares 2^4


def scaled_first(gs: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return the indices of the ScalingTensors and of the plain tensors."""
    kinds = [isinstance(g, ScalingTensor) for g in gs]
    return [i for i, scaled in enumerate(kinds) if scaled], [i for i, scaled in enumerate(kinds) if not scaled]


def first_pass(tables: Tables, scaled: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the gradients once: `grad_stats` of the scaled ones, then amaxes of the plain ones.

    Returns:
        FP32 [2, scaled + plain]: amaxes and scale_invs.
        int64 [scaled, 2]: sums of squares of the scaled ones.
    """
    sums = torch.zeros(0, 2, dtype=torch.int64, device=tables.device)
    parts = []
    if scaled:
        stats, sums = _of_scaled(tables, scaled)
        parts.append(stats)
    if plain:
        parts.append(ops.grad_stats(tables, plain, squares=False)[0])
    return torch.cat(parts, 1), sums


def _of_scaled(tables: Tables, gs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `grad_stats` of scaled gradients; only those without a tally are read."""
    tallies = [g.tally if isinstance(g, ScalingTensor) else None for g in gs]
    tallied = [i for i, tally in enumerate(tallies) if tally is not None]
    if not tallied:
        return ops.grad_stats(tables, gs)
    largest, whole, rest = torch.stack([tallies[i] for i in tallied]).unbind(1)  # type: ignore[misc]
    scale_invs = torch.stack([gs[i].scale_inv for i in tallied])  # type: ignore[attr-defined]
    amaxes = largest.to(torch.int32).view(torch.float32) * scale_invs.abs()
    stats = torch.stack([amaxes.masked_fill(amaxes.isnan(), float("inf")), scale_invs.masked_fill(scale_invs.isnan(), 0.0)])
    sums = carried(torch.stack([whole, rest], 1))
    if len(tallied) == len(gs):
        return stats, sums
    others = [i for i, tally in enumerate(tallies) if tally is None]
    more_stats, more_sums = ops.grad_stats(tables, [gs[i] for i in others])
    order = [*tallied, *others]
    back = tables.send(("order of tallied", *tallied), sorted(range(len(gs)), key=order.__getitem__))
    return torch.cat([stats, more_stats], 1).index_select(1, back), torch.cat([sums, more_sums]).index_select(0, back)


def second_pass(tables: Tables, plain: Sequence[torch.Tensor], amaxes: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
    """Return the sums of squares of plain gradients, which may be rows of larger tensors, int64 [plain, 2].

    Args:
        amaxes: FP32 [plain], of the whole tensors.
        numels: number of elements of the whole tensors.
    """
    return ops.grad_stats(tables, plain, unit_scale(amaxes), [units(numel) for numel in numels])[1]


def unit_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return the powers of two, FP64, that scale FP32 `amax` close to 1."""
    return ops.scale_from_amax(amax, 1.0, None, 1.0).double()


def units(numel: int) -> int:
    """Return the fixed-point units per 1 for a plain gradient's sum of squares, chosen so that `numel` terms fit in 57 bits."""
    return 2 ** max(0, min(46, _BITS - numel.bit_length()))


def norms_from_square_sums(totals: torch.Tensor, amaxes: torch.Tensor, scale_invs: torch.Tensor, plain_units: torch.Tensor) -> torch.Tensor:
    """Return the L2 norms of whole tensors, FP64 [n]; NaN if an amax is not finite.

    Args:
        totals: int64 [n, 2], sums of squares over all rows.
        amaxes: FP32 [n].
        scale_invs: FP32 [n], 0 for plain gradients.
        plain_units: FP64 [n], `units` of their number of elements.
    """
    whole, rest = carried(totals).double().unbind(1)
    scaled = scale_invs > 0
    parts = plain_units.masked_fill(scaled, PAYLOAD_UNITS)
    worth = torch.where(scaled, scale_invs.double(), unit_scale(amaxes).reciprocal())
    norms = ((whole + rest * 2.0**-30) / parts).sqrt() * worth
    return norms.masked_fill(~amaxes.isfinite(), float("nan"))


def grad_norm(gradients: Iterable[torch.Tensor], tables: Tables | None = None) -> torch.Tensor:
    """Return the global L2 norm of whole gradients, FP64 0-dim. A CUDA graph can contain the call if it passes the same tables as earlier
    calls; by default they are created here."""
    gs = list(gradients)
    if not gs:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    if tables is None or tables.device != gs[0].device:
        tables = Tables(gs[0].device)
    scaled, plain = ([contiguous(gs[i]) for i in places] for places in scaled_first(gs))
    stats, sums = first_pass(tables, scaled, plain)
    numels = [g.numel() for g in scaled + plain]
    if plain:
        sums = torch.cat([sums, second_pass(tables, plain, stats[0, len(scaled) :], numels[len(scaled) :])])
    parts = tables.send("units", [float(units(numel)) for numel in numels], torch.float64)
    return torch.linalg.vector_norm(norms_from_square_sums(sums, stats[0], stats[1], parts))


def check_max_norm(max_norm: float) -> None:
    """Raise a ValueError if the clipping norm is not positive."""
    if not max_norm > 0:
        raise ValueError(f"clipping norm is {max_norm}; it must be greater than 0 (leave it out to disable clipping)")


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return min(1, max_norm / (norm + 1e-6)), FP32 0-dim; ValueError if `max_norm` is not positive."""
    check_max_norm(max_norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0).float()


def clip_(gradients: Sequence[torch.Tensor], max_norm: float, tables: Tables | None = None) -> torch.Tensor:
    """Clip whole gradients, plain and FP8 together, to a global norm in place; `tables` as in `grad_norm`.

    For an FP8 gradient the coefficient is folded into its scale_inv, so no element is rounded again.

    Returns:
        The norm before clipping, FP64 0-dim.
    """
    norm = grad_norm(gradients, tables)
    coefficient = clip_coefficient(norm, max_norm)
    for g in gradients:
        g.mul_(coefficient.to(g.device))
    return norm
