"""Adam's arithmetic in FP32, in the order of operations of torch.optim.AdamW, so that FP32 states are equal bit for bit.

Rounded moments can do what exact moments never do. If v has become 0 and m has not, the step is lr m / eps. If m rounds back to its own
code, it moves the weight forever. So three guards apply to every moment that is not FP32, with any rounding:

1. In a tensor that has had a gradient, v is stored as at least the format's smallest value, never as 0.
2. If the gradient of an element is 0, the code of m must decrease: a code that would round back to itself becomes the next smaller one.
   Stochastic rounding decreases it by itself, except that values below the format's smallest normal value are rounded toward zero. COAT's
   codes change their values at each step; they decrease if they would undo more than half of the decay.
3. No step exceeds the supremum of Adam's step over all gradients, lr (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), from the
   Cauchy-Schwarz inequality: 1.17 lr at betas 0.9 and 0.95, 7.3 lr at 0.9 and 0.999. The step of exact moments never reaches it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch

from msamp.kernels.reference.grad_stats import grad_stats
from msamp.kernels.reference.store import NEAREST, Rounding, is_rounded, load, store_
from msamp.kernels.tables import Tables
from msamp.numerics.range_expand import Expanded
from msamp.numerics.stochastic_rounding import Thresholds
from msamp.numerics.tensor import ScalingTensor, fp32_values

# Elements updated at a time: each of about six FP32 temporaries takes 128 MiB, or the size of the largest tensor.
CHUNK = 2**25
GRAD, M, V, MASTER = range(4)  # rows of the table of amaxes
_LISTS = ("grads", "masters", "weights", "steps", "indices", "places", "keys", "offsets")  # lists of a Batch besides its states
_OPTIONAL = ("grads", "weights", "keys", "offsets")
_WITH_PAYLOAD = (ScalingTensor, Expanded)


class Hyper(NamedTuple):
    """Adam's hyperparameters of one parameter group; `weight_decay` is decoupled (AdamW's)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @property
    def largest_step(self) -> float:
        """Return the supremum of Adam's step over all gradients, in units of lr; infinite if beta1^2 >= beta2 > 0.

        m = (1 - beta1) sum beta1^i g_i is the inner product of sqrt(beta2)^i g_i and (beta1 / sqrt(beta2))^i; the norm of the first is
        sqrt(v / (1 - beta2)). Bias correction makes the quotient smaller.
        """
        if self.beta1 and self.beta1**2 >= self.beta2:
            return math.inf
        ratio = self.beta1**2 / self.beta2 if self.beta2 else 0.0
        return (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - ratio))


def hyper_numbers(hyper: Hyper) -> list[float]:
    """Return the numbers that the kernels read on the device: a `Hyper`, the logarithms of its betas, and the largest step."""
    return [*hyper, *(math.log(beta) if beta else -math.inf for beta in (hyper.beta1, hyper.beta2)), hyper.largest_step]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Parameters, or rows of parameters, that are updated together. Each list has one entry per parameter, and its tensors are all plain of
    one dtype, or all ScalingTensors or all Expanded of one format.

    Attributes:
        grads: any format; only read. Empty if nothing is updated.
        masters: updated in place.
        weights: cast from the stored masters; empty if the masters are the weights.
        states: by key, the update's states besides the master, changed in place including scales; AdamW's are named below.
        steps: FP32 0-dim, the number of steps taken, incremented.
        indices: columns in the table of amaxes of whole tensors.
        places: columns in the table of stored amaxes.
        keys: for stochastic rounding (`tensor_key`); empty with nearest rounding.
        offsets: index of the first element within the parameter, for rows of a parameter; as many as keys.
    """

    grads: list[torch.Tensor]
    masters: list[torch.Tensor]
    weights: list[torch.Tensor]
    states: dict[str, list[Any]]
    steps: list[torch.Tensor]
    indices: list[int]
    places: list[int]
    keys: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise a ValueError if lists differ in length, tensors of one parameter in shape or device, or tensors of one list in format. A
        kernel only gets addresses and one length, and would write to other tensors' memory."""
        for name, column in (self._lists() | self.states).items():
            if len(column) != len(self.masters) and (column or name not in _OPTIONAL):
                raise ValueError(f"{len(self.masters)} masters were passed with {len(column)} {name}; pass the same number of each")
        bare = [x.payload if isinstance(x, _WITH_PAYLOAD) else x for x in self.masters]
        for name, column in {"grads": self.grads, "masters": self.masters, "weights": self.weights, **self.states}.items():
            kinds = set()
            for x, stored in zip(column, bare, strict=False):
                payload = x.payload if isinstance(x, _WITH_PAYLOAD) else x
                kinds.add((payload.dtype, isinstance(x, ScalingTensor)))
                if payload.shape != stored.shape or payload.device != stored.device:
                    raise ValueError(
                        f"a master is {_described(stored)}, but its entry in {name} is {_described(payload)}; a parameter, its gradient "
                        "and its states must have the same shape and device"
                    )
            if len(kinds) > 1:
                listed = ", ".join(sorted(f"{dtype}{' with a scale' if scaled else ''}" for dtype, scaled in kinds))
                raise ValueError(f"{name} have several formats ({listed}); put tensors of one format in a batch")

    @property
    def ms(self) -> list[Any]:
        """AdamW's first moments; `Expanded` ones are for `coat_adamw`."""
        return self.states["exp_avg"]

    @property
    def vs(self) -> list[Any]:
        """AdamW's second moments, as `ms`."""
        return self.states["exp_avg_sq"]

    @property
    def weight_remainders(self) -> list[torch.Tensor]:
        """Remainders or compensations of the masters, for BF16 updates (`reference.collage`); otherwise empty."""
        return self.states.get("weight_remainder", [])

    @property
    def v_remainders(self) -> list[torch.Tensor]:
        """Remainders of the second moments, for BF16 updates; otherwise empty."""
        return self.states.get("exp_avg_sq_remainder", [])

    def each(self, take: Callable[[list[Any]], list[Any]]) -> Self:
        """Return the batch with `take` applied to each non-empty list, for example to select parameters."""
        lists: dict[str, Any] = {name: take(column) for name, column in self._lists().items() if column}
        return replace(self, **lists, states={key: take(column) for key, column in self.states.items()})

    def chunks(self) -> Iterator[Self]:
        """Split the batch into parts of at most CHUNK elements (or one larger tensor)."""
        start, elements = 0, 0
        for i, g in enumerate(self.grads):
            if i > start and elements + g.numel() > CHUNK:
                yield self._part(start, i)
                start, elements = i, 0
            elements += g.numel()
        yield self._part(start, len(self.grads)) if start else self

    def _part(self, start: int, end: int) -> Self:
        return self.each(lambda column: column[start:end])

    def _lists(self) -> dict[str, list[Any]]:
        """Return the lists by name, without the states."""
        return {name: getattr(self, name) for name in _LISTS}


def _described(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"


def adamw(
    tables: Tables | None,
    batch: Batch,
    hyper: torch.Tensor,
    amaxes: torch.Tensor,
    kept: torch.Tensor,
    coefficient: torch.Tensor | None,
    usable: torch.Tensor,
    *,
    decoupled: bool,
    rounding: Rounding = NEAREST,
) -> None:
    """Load, update and store (FP8-LM section 2.2), or do nothing if the step is not usable.

    Scales come from bounds that are known before the values: m from beta1 amax_m + (1 - beta1) amax_g, v likewise with squares, master from
    twice its amax, weight from `weight_bound`. A weight is cast from its stored master. If it were cast from the unrounded update, each
    weight whose master is midway between two FP8 codes (one BF16 value in 16) could jump by a code after an update too small for it.

    Args:
        tables: stores the kernel's table of addresses; the twin needs none.
        batch: the tensors.
        hyper: FP64 [5 or more], a `Hyper` first.
        amaxes: FP32 [4 or more, parameters]: stored amaxes of gradient, m, v and master, of whole tensors.
        kept: FP32 [3 or more, pieces], changed in place: amaxes of m, v and master as this call stores them; rows of plain moments are
            0, and so is the amax of a plain master unless its weight is scaled or the decay is Adam's.
        coefficient: FP32 0-dim, the factor of the gradients; None: 1.
        usable: bool 0-dim, whether to take the step.
        decoupled: False adds weight decay to the gradient, as in Adam.
        rounding: of moments and masters; stochastic rounding requires the batch's keys.
    """
    if not bool(usable):
        return
    numbers = Hyper(*hyper.tolist()[:5])
    for part in batch.chunks():
        update_(part, numbers, amaxes[:, part.indices], kept, coefficient, decoupled=decoupled, rounding=rounding)


def update_(
    batch: Batch,
    hyper: Hyper,
    amaxes: torch.Tensor,
    kept: torch.Tensor,
    coefficient: torch.Tensor | None,
    *,
    decoupled: bool,
    rounding: Rounding,
    bounded: bool = False,
) -> None:
    """Run `adamw` for a usable step on a batch small enough for FP32 temporaries.

    Args:
        amaxes: FP32 [4 or more, tensors of the batch].
        bounded: limit the step even if the moments are FP32 here, because the caller rounds them.
        The others are those of `adamw`.
    """
    gs = [fp32_values(g) for g in batch.grads]
    g_amax = amaxes[GRAD]
    if coefficient is not None:
        gs = [g * coefficient for g in gs]
        g_amax = g_amax * coefficient
    ms, vs, ps = load(batch.ms), load(batch.vs), load(batch.masters)
    if hyper.weight_decay and not decoupled:  # Adam's decay is part of the gradient, so it counts in the bounds
        gs = list(torch._foreach_add(gs, ps, alpha=hyper.weight_decay))
        g_amax = g_amax + hyper.weight_decay * amaxes[MASTER]
        hyper = hyper._replace(weight_decay=0.0)
    torch._foreach_add_(batch.steps, 1)
    m_bound = hyper.beta1 * amaxes[M] + (1 - hyper.beta1) * g_amax
    v_bound = hyper.beta2 * amaxes[V] + (1 - hyper.beta2) * g_amax.square()
    p_bound = 2.0 * amaxes[MASTER]
    steps = [int(step) for step in batch.steps]
    bounded |= is_rounded(batch.ms) or is_rounded(batch.vs)
    adam_(ps, ms, vs, gs, steps, hyper, hyper.largest_step if bounded else math.inf)
    thresholds = None if rounding == NEAREST else [Thresholds(*draw) for draw in zip(batch.keys, batch.offsets, steps, strict=True)]
    of_m, of_v, of_masters = (thresholds if stochastic else None for stochastic in rounding)
    store_(batch.ms, ms, m_bound, of_m, "m", no_gradient=[g == 0 for g in gs] if is_rounded(batch.ms) else None)
    store_(batch.vs, vs, v_bound, of_v, "v", positive=True)
    store_(batch.masters, ps, p_bound, of_masters, "master")
    if batch.weights:
        reach = torch.tensor(hyper.lr * hyper.largest_step, dtype=torch.float64, device=g_amax.device)
        store_(batch.weights, load(batch.masters), weight_bound(amaxes[MASTER], reach))
    kept[:MASTER, batch.places] = stored_amaxes((batch.ms, batch.vs), batch.masters, batch.weights, decoupled=decoupled)


def weight_bound(amax: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """Return upper bounds of weights after a step. So a small step keeps their scales, and one at a learning rate of 0, such as a warm-up's
    first, all their codes: twice the amax would take a binade from the weights that a model was converted to, or that were loaded.

    Args:
        amax: FP32 [n], of the stored masters. Decay only makes it smaller, and what exceeds its double saturates in the master.
        reach: FP64 0-dim, lr times `Hyper.largest_step`; infinite ones tell nothing, NaN is 0 times infinity.
    """
    bound = amax + reach.nan_to_num().float()
    return torch.where(bound < 2.0 * amax, bound, 2.0 * amax)


def stored_amaxes(
    states: Sequence[Sequence[Any]], masters: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *, decoupled: bool
) -> torch.Tensor:
    """Return the stored amaxes of each list of states and of the masters, FP32 [states + 1, n]; 0 if no scale or bound follows from one.
    `weights` as in a `Batch`."""
    columns = (*states, masters)
    wanted = [isinstance(column[0], ScalingTensor) for column in columns]
    wanted[-1] |= not decoupled or any(isinstance(x, ScalingTensor) for x in weights)
    none = torch.zeros(len(masters), device=masters[0].device, dtype=torch.float32)
    return torch.stack([grad_stats(None, x, squares=False)[0][0] if want else none for x, want in zip(columns, wanted, strict=True)])


def adam_(
    ps: list[torch.Tensor],
    ms: list[torch.Tensor],
    vs: list[torch.Tensor],
    gs: list[torch.Tensor],
    steps: Sequence[int],
    hyper: Hyper,
    largest_step: float = math.inf,
) -> None:
    """Take one step of AdamW on lists of tensors, in place.

    The parameters are updated with the new moments before these are rounded (FP8-LM section 2.2).

    Args:
        ps, ms, vs, gs: parameters, first and second moments, gradients; FP32, corresponding entries of equal shape. `gs` is only read.
        steps: number of this step for each tensor, from 1.
        hyper: the group's hyperparameters.
        largest_step: limit of the step in units of lr, without the decay.
    """
    lr, beta1, beta2, eps, weight_decay = hyper
    if weight_decay:
        torch._foreach_mul_(ps, 1 - lr * weight_decay)
    torch._foreach_lerp_(ms, gs, 1 - beta1)
    torch._foreach_mul_(vs, beta2)
    torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)
    denominators = list(torch._foreach_sqrt(vs))
    torch._foreach_div_(denominators, [(1 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(denominators, eps)
    if largest_step < math.inf:
        tops = torch._foreach_mul(denominators, [largest_step * (1 - beta1**step) for step in steps])
        ms = list(torch._foreach_maximum(torch._foreach_minimum(ms, tops), torch._foreach_neg(tops)))
    torch._foreach_addcdiv_(ps, ms, denominators, [-(lr / (1 - beta1**step)) for step in steps])
