"""What a step's gradients decide before the update: amaxes, norm, what multiplies them, and whether the step can be taken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from msamp.kernels.reference.adamw import GRAD
from msamp.kernels.tables import Tables
from msamp.numerics.formats import Format
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.optim.clip import clip_coefficient, first_pass, norms_from_square_sums, scaled_first, second_pass, units
from msamp.optim.kept_states import update_of
from msamp.optim.shard import Holding, Shard
from msamp.optim.states import scale_inv, weight_format

SCALE_INV = -1  # row of the table of amaxes: the gradient's scale_inv


class LossScale(Protocol):
    """What multiplied the loss, and with it every gradient (`msamp.fp16.scaler.LossScaler` is one)."""

    def scale(self, device: torch.device) -> torch.Tensor:
        """FP32 0-dim on `device`; where a CUDA graph holds the step, always in the same memory."""

    def update(self, overflow: torch.Tensor) -> None:
        """Look at a step: bool 0-dim on the device, whether its gradients were not finite."""


@dataclass(frozen=True)
class GradientDecision:
    """What the gradients of a step have decided.

    Attributes:
        amaxes: FP32 [rows, parameters]: amax of the gradient, those of the states that the updates keep and of the master, as stored, 0
            where no scale will be taken from it (`msamp.optim.updates`), and last the gradient's scale_inv, 0 for a plain one; of whole
            parameters.
        norm: FP64 0-dim, of all gradients.
        coefficient: FP32 0-dim, what multiplies them; None: nothing does.
        usable: bool 0-dim, whether the step can be taken.
    """

    amaxes: torch.Tensor
    norm: torch.Tensor
    coefficient: torch.Tensor | None
    usable: torch.Tensor


class Measured(NamedTuple):
    """What gradients are, before anything is decided.

    Attributes:
        amaxes: as of `GradientDecision`; its first row and the last where no amaxes as stored were given.
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
) -> Measured:
    """Amaxes and norm of gradients, whichever process holds them; collective where a shard has several.

    Args:
        ready: this process's holdings, with gradients.
        params: all parameters, by `Holding.index`.
        tables: of the device.
        shard: combines the holdings of all processes.
        kept: gives FP32 [rows, holdings], the amaxes as stored of holdings; None where no scale will be taken from them.
        combine_norms: FP64 [parameters] norms of this process's parameters -> the global norm.
    """
    given = [holding.grad for holding in ready if holding.grad is not None]
    scaled, plain = scaled_first(given)
    gs, ordered = [given[i] for i in scaled + plain], [ready[i] for i in scaled + plain]
    rows = torch.zeros(0, len(ordered), device=tables.device, dtype=torch.float32) if kept is None else kept(ordered)
    table = torch.zeros(len(rows) + 2, len(params), device=tables.device, dtype=torch.float32)
    sums = torch.zeros(len(params), 2, dtype=torch.int64, device=tables.device)
    if ready:
        stats, found = first_pass(tables, gs[: len(scaled)], gs[len(scaled) :])
        index = tables.send("indices", [holding.index for holding in ordered])
        table.scatter_reduce_(1, index.expand(len(table), -1), torch.cat([stats[:1], rows, stats[1:]]), "amax")
        sums.index_add_(0, index[: len(scaled)], found)
    table = shard.largest(table)
    if plain:
        index = tables.send("indices of plain", [ready[i].index for i in plain])
        numels = [ready[i].param.numel() for i in plain]
        sums.index_add_(0, index, second_pass(tables, gs[len(scaled) :], table[GRAD, index], numels))
    plain_units = tables.send("units", [float(units(p.numel())) for p in params], torch.float64)
    return Measured(table, combine_norms(norms_from_square_sums(shard.total(sums), table[GRAD], table[SCALE_INV], plain_units)))


def decide(measured: Measured, *, clip_grad: float | None, loss_scale: LossScale | None) -> GradientDecision:
    """What multiplies the gradients, and whether the step can be taken.

    Args:
        measured: with amaxes as stored.
        clip_grad: the largest norm; None does not clip.
        loss_scale: by what the gradients are too large; None: they are as they should be.
    """
    table, norm = measured
    coefficient = None
    if loss_scale is not None:
        coefficient = loss_scale.scale(norm.device).reciprocal()
        norm = norm * coefficient
    if clip_grad is not None:
        clip = clip_coefficient(norm, clip_grad)
        coefficient = clip if coefficient is None else clip * coefficient
    # A gradient with a square beyond FP32 would leave the second moment without a bound; clipping brings it back in range.
    usable = norm.isfinite() if clip_grad is not None else norm.float().square().isfinite()
    return GradientDecision(table, norm, coefficient, usable)


def weight_scale_invs(
    wholes: Sequence[Holding], amaxes: torch.Tensor, usable: torch.Tensor, tables: Tables
) -> dict[torch.Tensor, torch.Tensor]:
    """The scale_inv that each scaled weight has after the step of a decision, as its owner computes it (`store_`)."""
    alike: dict[tuple[Format, int], list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
    for whole in wholes:
        last = scale_inv(whole.param)
        if last is not None:
            kind = weight_format(whole.param), update_of(whole.formats).master_row
            alike.setdefault(kind, []).append((whole.index, whole.param, last))
    found: dict[torch.Tensor, torch.Tensor] = {}
    for (fmt, row), members in alike.items():
        indices, params, scale_invs = (list(column) for column in zip(*members, strict=True))
        last = torch.stack(scale_invs)
        index = tables.send(("weights", fmt, row), indices)
        new = inverse(scale_from_amax(2.0 * amaxes[row][index], fmt.max, inverse(last)))
        found |= zip(params, torch.where(usable, new, last).unbind(), strict=True)
    return found
