"""Adam's arithmetic, written once: FP32, in torch.optim.AdamW's own order of operations, so that FP32 states equal it bit for bit.

Moments that are rounded to fewer bits can leave what Adam's moments never leave: a second moment that has become 0 under a first moment
that has not makes the step lr m / eps, and a first moment that rounds back to its own code moves the weight for ever. Three guards hold
wherever a moment is not FP32, whatever the rounding:

1. v is never stored as 0 but as the format's smallest value, in a tensor that has had a gradient.
2. Where the gradient is 0, m's code falls: a code that would round back to itself becomes the next smaller one. With stochastic rounding,
   which moves by itself, values below the format's smallest normal value are rounded toward zero there. COAT's codes change their
   values at each step; they fall where they would undo more than half of the decay.
3. No step is larger than Adam's own supremum over all gradients, lr (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), which
   follows from Cauchy and Schwarz's inequality: 1.17 lr at betas 0.9 and 0.95, 7.3 lr at 0.9 and 0.999. The step of exact moments never
   reaches it.
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

# Elements updated at a time: each of the half dozen FP32 temporaries takes 128 MiB, or as much as the largest tensor.
CHUNK = 2**25
GRAD, M, V, MASTER = range(4)  # rows of the table of amaxes
_LISTS = ("grads", "masters", "weights", "steps", "indices", "places", "keys", "offsets")  # of a Batch, beside its states
_OPTIONAL = ("grads", "weights", "keys", "offsets")
_WITH_PAYLOAD = (ScalingTensor, Expanded)


class Hyper(NamedTuple):
    """Adam's numbers for one parameter group; `weight_decay` is decoupled (AdamW's)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @property
    def largest_step(self) -> float:
        """The supremum of Adam's step over all gradients, in units of lr; infinite where beta1^2 >= beta2 > 0, and there is none.

        m = (1 - beta1) sum beta1^i g_i is the inner product of sqrt(beta2)^i g_i and (beta1 / sqrt(beta2))^i; the norm of the first is
        sqrt(v / (1 - beta2)). Bias correction makes the quotient smaller.
        """
        if self.beta1 and self.beta1**2 >= self.beta2:
            return math.inf
        ratio = self.beta1**2 / self.beta2 if self.beta2 else 0.0
        return (1 - self.beta1) / math.sqrt((1 - self.beta2) * (1 - ratio))


def hyper_numbers(hyper: Hyper) -> list[float]:
    """What the kernels find on the device: a `Hyper`, the logarithms of its betas, and the largest step."""
    return [*hyper, *(math.log(beta) if beta else -math.inf for beta in (hyper.beta1, hyper.beta2)), hyper.largest_step]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Parameters, or rows of parameters, that are updated together: each list has one entry for each, and its tensors are all plain and of
    one dtype, or ScalingTensors or Expanded of one format.

    Attributes:
        grads: any format; only read. Empty where nothing is updated.
        masters: what is updated in place.
        weights: what is cast from the masters as stored; empty where the masters are the weights.
        states: by key, what the update keeps beside the master, changed in place, scales too; AdamW's are named below.
        steps: FP32 0-dim, the number of steps taken, raised by one.
        indices: column of each in the table of amaxes of whole tensors.
        places: column of each in the table of amaxes as stored.
        keys: of each one's thresholds for stochastic rounding (`tensor_key`); empty with nearest rounding.
        offsets: index of each one's first element in its parameter, where it is some rows of it; as many as keys.
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
        """ValueError where lists differ in length, or tensors of one parameter in shape or device, or those of a list in format: a kernel
        takes addresses and one length, and would write into the memory of others."""
        for name, column in (self._lists() | self.states).items():
            if len(column) != len(self.masters) and (column or name not in _OPTIONAL):
                raise ValueError(f"{len(self.masters)} masters are given with {len(column)} {name}; give as many of each")
        bare = [x.payload if isinstance(x, _WITH_PAYLOAD) else x for x in self.masters]
        for name, column in {"grads": self.grads, "masters": self.masters, "weights": self.weights, **self.states}.items():
            kinds = set()
            for x, stored in zip(column, bare, strict=False):
                payload = x.payload if isinstance(x, _WITH_PAYLOAD) else x
                kinds.add((payload.dtype, isinstance(x, ScalingTensor)))
                if payload.shape != stored.shape or payload.device != stored.device:
                    raise ValueError(
                        f"a master is {_described(stored)}, and what stands beside it in {name} is {_described(payload)}; a parameter, its "
                        "gradient and its states have one shape, on one device"
                    )
            if len(kinds) > 1:
                listed = ", ".join(sorted(f"{dtype}{' with a scale' if scaled else ''}" for dtype, scaled in kinds))
                raise ValueError(f"{name} are in several formats ({listed}); update those of one format together")

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
        """What stands beside the masters for updates in BF16 (`reference.collage`), else empty."""
        return self.states.get("weight_remainder", [])

    @property
    def v_remainders(self) -> list[torch.Tensor]:
        """What stands beside the second moments for updates in BF16, else empty."""
        return self.states.get("exp_avg_sq_remainder", [])

    def each(self, take: Callable[[list[Any]], list[Any]]) -> Self:
        """The batch with `take` of each list that is not empty in its place, such as some of the parameters."""
        lists: dict[str, Any] = {name: take(column) for name, column in self._lists().items() if column}
        return replace(self, **lists, states={key: take(column) for key, column in self.states.items()})

    def chunks(self) -> Iterator[Self]:
        """The batch in parts of at most CHUNK elements (or one larger tensor)."""
        start, elements = 0, 0
        for i, g in enumerate(self.grads):
            if i > start and elements + g.numel() > CHUNK:
                yield self._part(start, i)
                start, elements = i, 0
            elements += g.numel()
        yield self._part(start, len(self.grads))

    def _part(self, start: int, end: int) -> Self:
        return self.each(lambda column: column[start:end])

    def _lists(self) -> dict[str, list[Any]]:
        """The lists by name, but for the states."""
        return {name: getattr(self, name) for name in _LISTS}


def _described(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"


def check_amaxes(batch: Batch, hyper: torch.Tensor, amaxes: torch.Tensor, kept: torch.Tensor, *others: Any, **flags: Any) -> None:
    """ValueError where a batch has columns that the tables of amaxes lack; the arguments are those of `adamw`, without its tables."""
    for name, table, columns in (("amaxes", amaxes, batch.indices), ("kept", kept, batch.places)):
        if not all(0 <= column < table.shape[1] for column in columns):
            raise ValueError(
                f"{name} has {table.shape[1]} columns, and the batch asks for {min(columns)} to {max(columns)}; give it as many"
            )


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
    """Load, update, store (FP8-LM section 2.2), or nothing at all where the step is not usable.

    Scales come from bounds that hold before the values are known: m from beta1 amax_m + (1 - beta1) amax_g, v likewise with squares,
    master and weight from twice the master's amax. A weight is cast from its master as stored: a cast of the unrounded update would
    let every weight with a master that sits midway between two FP8 codes (one BF16 value in 16) jump by a code with an update too small for
    the master.

    Args:
        tables: where the kernel keeps its table of addresses; the twin needs none.
        batch: the tensors.
        hyper: FP64 [5 or more], a `Hyper` first.
        amaxes: FP32 [4 or more, parameters]: of gradient, m, v and master as stored, of whole tensors.
        kept: FP32 [3 or more, pieces], changed in place: amaxes of m, v and master as this call stores them; rows of plain moments are
            0, and so is that of a plain master unless its weight is scaled or its decay Adam's.
        coefficient: FP32 0-dim: multiplies gradients; None clips nothing.
        usable: bool 0-dim.
        decoupled: False takes weight decay as Adam's, in the gradient.
        rounding: of moments and masters as they are stored; stochastic rounding needs the batch's keys.
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
    """`adamw` of a usable step on tensors that are few enough for their FP32 temporaries.

    Args:
        amaxes: FP32 [4 or more, tensors of the batch].
        bounded: the moments are rounded by the caller, although they are FP32 here: the guard of the step holds.
        The others: as of `adamw`.

    Raises:
        ValueError: for stochastic rounding of a batch without keys; nothing has changed then.
    """
    if rounding != NEAREST:
        check_keys(batch)
    gs = [fp32_values(g) for g in batch.grads]
    g_amax = amaxes[GRAD]
    if coefficient is not None:
        gs = [g * coefficient for g in gs]
        g_amax = g_amax * coefficient
    ms, vs, ps = load(batch.ms), load(batch.vs), load(batch.masters)
    if hyper.weight_decay and not decoupled:  # Adam's decay is part of the gradient, so the bounds must see it
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
    of_m, of_v, of_masters = thresholds_of(batch, steps, rounding)
    store_(batch.ms, ms, m_bound, of_m, "m", silent=[g == 0 for g in gs] if is_rounded(batch.ms) else None)
    store_(batch.vs, vs, v_bound, of_v, "v", positive=True)
    store_(batch.masters, ps, p_bound, of_masters, "master")
    if batch.weights:
        store_(batch.weights, load(batch.masters), p_bound)
    kept[:MASTER, batch.places] = stored_amaxes((batch.ms, batch.vs), batch.masters, batch.weights, decoupled=decoupled)


def stored_amaxes(
    states: Sequence[Sequence[Any]], masters: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *, decoupled: bool
) -> torch.Tensor:
    """FP32 [states + 1, n]: amaxes of each list of states and of the masters, as they are stored; 0 where no scale and no bound will be
    taken from them. `weights` as in a `Batch`."""
    columns = (*states, masters)
    wanted = [isinstance(column[0], ScalingTensor) for column in columns]
    wanted[-1] |= not decoupled or any(isinstance(x, ScalingTensor) for x in weights)
    none = torch.zeros(len(masters), device=masters[0].device, dtype=torch.float32)
    return torch.stack([grad_stats(None, x, squares=False)[0][0] if want else none for x, want in zip(columns, wanted, strict=True)])


def thresholds_of(batch: Batch, steps: Sequence[int], rounding: Rounding) -> list[list[Thresholds] | None]:
    """Of m, v and the masters, each tensor's thresholds at its step; None of what is rounded to nearest."""
    if rounding == NEAREST:
        return [None, None, None]
    found = [Thresholds(*each) for each in zip(batch.keys, batch.offsets, steps, strict=True)]
    return [found if stochastic else None for stochastic in rounding]


def check_keys(batch: Batch) -> None:
    """ValueError where a batch has no keys for stochastic rounding."""
    if not batch.keys or not batch.offsets:
        raise ValueError(
            f"stochastic rounding is asked for {len(batch.grads)} tensors without keys and offsets of their thresholds; give each its own "
            "(msamp.numerics.stochastic_rounding.tensor_key), or round to nearest"
        )


def adam_(
    ps: list[torch.Tensor],
    ms: list[torch.Tensor],
    vs: list[torch.Tensor],
    gs: list[torch.Tensor],
    steps: Sequence[int],
    hyper: Hyper,
    largest_step: float = math.inf,
) -> None:
    """One step of AdamW on lists of tensors, in place.

    The parameters are updated from the moments as just computed, before those are rounded to what stores them
    (FP8-LM section 2.2).

    Args:
        ps, ms, vs, gs: parameters, first and second moments, gradients; FP32, equal shapes at equal places. `gs` is only read.
        steps: number of this step for each tensor, from 1.
        hyper: the group's numbers.
        largest_step: in units of lr, what no step exceeds, but for the decay.
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
