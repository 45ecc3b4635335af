"""Measure the gradients of a step (amaxes and norm), then decide on the clip coefficient and whether to take the step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from msamp.kernels.reference.adamw import GRAD
from msamp.kernels.tables import Tables
from msamp.numerics.formats import by_name
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.optim.clip import clip_coefficient, first_pass, norms_from_square_sums, scaled_first, second_pass, units
from msamp.optim.shard import Holding, Shard
from msamp.optim.states import is_own_master, scale_inv, weight_format
from msamp.optim.updates import Update, update_of

SCALE_INV = -1  # row of the table of amaxes: the gradient's scale_inv


class LossScale(Protocol):
    """A loss scale, by which every gradient is too large (such as `msamp.fp16.scaler.LossScaler`)."""

    def scale(self, device: torch.device) -> torch.Tensor:
        """Return the loss scale, FP32 0-dim on `device`; always in the same memory if a CUDA graph contains the step."""

    def update(self, overflow: torch.Tensor) -> None:
        """Adapt the loss scale after a step. `overflow`: bool 0-dim on the device, whether its gradients were not finite."""


class GradScale:
    """The `grad_scale` of torch's GradScaler as the optimizer's loss scale.

    Args:
        factor: FP32 0-dim, the loss scale.
    """

    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor

    def scale(self, device: torch.device) -> torch.Tensor:
        """Return the factor on `device`."""
        return self.factor.to(device, torch.float32)

    def update(self, overflow: torch.Tensor) -> None:
        """Do nothing: GradScaler tracks overflows itself."""


@dataclass(frozen=True)
class GradientDecision:
    """The decision on a step.

    Attributes:
        amaxes: FP32 [rows, parameters], of whole parameters. Rows: amax of the gradient; stored amaxes of the states in `Update.kept` and
            of the master, 0 if no scale follows from it (`msamp.optim.updates`); last the gradient's scale_inv, 0 for a plain gradient.
        norm: FP64 0-dim, of all gradients.
        coefficient: FP32 0-dim, the factor of all gradients; None: 1.
        usable: bool 0-dim, whether to take the step.
    """

    amaxes: torch.Tensor
    norm: torch.Tensor
    coefficient: torch.Tensor | None
    usable: torch.Tensor


class MeasuredGradients(NamedTuple):
    """The measured gradients.

    Attributes:
        amaxes: as in `GradientDecision`; only its first and last row if there are no stored amaxes.
        norm: FP64 0-dim, of all gradients, before a loss scale is divided out.
    """

    amaxes: torch.Tensor
    norm: torch.Tensor


def measure(
    ready: Sequence[Holding],
    params: Sequence[torch.Tensor],
    tables: Tables,
    shard: Shard,
    kept: Callable[[Sequence[Holding]], torch.Tensor] | None,
    combine_norms: Callable[[torch.Tensor], torch.Tensor],
) -> MeasuredGradients:
    """Measure amaxes and norm of the gradients of all processes; collective if the shard has several.

    Args:
        ready: this process's holdings, with gradients.
        params: all parameters, by `Holding.index`.
        tables: of the device.
        shard: combines the holdings of all processes.
        kept: returns the stored amaxes of holdings, FP32 [rows, holdings]; None if no scale will follow from them.
        combine_norms: FP64 [parameters] norms of this process's parameters -> the global norm.
    """
    given = [holding.grad for holding in ready if holding.grad is not None]
    scaled, plain = scaled_first(given)
    gs, ordered = [given[i] for i in scaled + plain], [ready[i] for i in scaled + plain]
    rows = torch.zeros(0, len(ordered), device=tables.device, dtype=torch.float32) if kept is None else kept(ordered)
    table = torch.zeros(len(rows) + 2, len(params), device=tables.device, dtype=torch.float32)
    sums = torch.zeros(len(params), 2, dtype=torch.int64, device=tables.device)
    if ready:
        stats, squares = first_pass(tables, gs[: len(scaled)], gs[len(scaled) :])
        index = tables.send("indices", [holding.index for holding in ordered])
        table.scatter_reduce_(1, index.expand(len(table), -1), torch.cat([stats[:1], rows, stats[1:]]), "amax")
        sums.index_add_(0, index[: len(scaled)], squares)
    table = shard.largest(table)
    if plain:
        index = tables.send("indices of plain", [ready[i].index for i in plain])
        numels = [ready[i].param.numel() for i in plain]
        sums.index_add_(0, index, second_pass(tables, gs[len(scaled) :], table[GRAD, index], numels))
    plain_units = tables.send("units", [float(units(p.numel())) for p in params], torch.float64)
    return MeasuredGradients(table, combine_norms(norms_from_square_sums(shard.total(sums), table[GRAD], table[SCALE_INV], plain_units)))


def decide(measured: MeasuredGradients, *, clip_grad: float | None, loss_scale: LossScale | None) -> GradientDecision:
    """Compute the factor of the gradients, and whether to take the step.

    Args:
        measured: with stored amaxes.
        clip_grad: the maximum norm; None does not clip.
        loss_scale: of the gradients; None if they are unscaled.
    """
    table, norm = measured
    coefficient = None
    if loss_scale is not None:
        coefficient = loss_scale.scale(norm.device).reciprocal()
        norm = norm * coefficient
    if clip_grad is not None:
        clip = clip_coefficient(norm, clip_grad)
        coefficient = clip if coefficient is None else clip * coefficient
    # If the square of a gradient overflows FP32, the second moment has no bound. Clipping brings the gradient back into range.
    usable = norm.isfinite() if clip_grad is not None else norm.float().square().isfinite()
    return GradientDecision(table, norm, coefficient, usable)


def weight_scale_invs(
    wholes: Sequence[Holding],
    amaxes: torch.Tensor,
    usable: torch.Tensor,
    tables: Tables,
    hyper: Callable[[Mapping[str, Any], Update], torch.Tensor],
) -> dict[torch.Tensor, torch.Tensor]:
    """Return the scale_inv that each scaled weight will have after the step, computed as its owner does (`store_`)."""
    alike: dict[tuple[Any, ...], list[tuple[Holding, torch.Tensor]]] = {}
    for whole in wholes:
        last = scale_inv(whole.param)
        if last is not None:
            fmt = weight_format(whole.param)
            kind = fmt, is_own_master(whole.param, by_name(whole.formats["master"])), id(whole.group), whole.formats["update"]
            alike.setdefault(kind, []).append((whole, last))
    by_parameter: dict[torch.Tensor, torch.Tensor] = {}
    for kind, members in alike.items():
        owned, scale_invs = (list(column) for column in zip(*members, strict=True))
        (fmt, own_master, *_), update, last = kind, update_of(owned[0].formats), torch.stack(scale_invs)
        own = amaxes[:, tables.send(("weights", *kind), [whole.index for whole in owned])]
        bounds = 2.0 * own[update.master_row] if own_master else update.weight_bounds(hyper(owned[0].group, update), own)
        new = inverse(scale_from_amax(bounds, fmt.max, inverse(last)))
        by_parameter |= zip((whole.param for whole in owned), torch.where(usable, new, last).unbind(), strict=True)
    return by_parameter
