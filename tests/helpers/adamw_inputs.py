"""The numbers, the batches and the runs that the tests of AdamW's kernels share."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from helpers.numerics import bits, make
from msamp.kernels.reference.adamw import Batch, Hyper, hyper_numbers
from msamp.kernels.reference.store import NEAREST, Rounding
from msamp.kernels.tables import Tables
from msamp.numerics.formats import Format
from msamp.numerics.range_expand import Expanded, quantize_expanded
from msamp.numerics.recipe import StateFormats
from msamp.numerics.stochastic_rounding import tensor_key
from msamp.numerics.tensor import ScalingTensor

KINDS = ("normal", "log-normal", "channel-outlier")
HYPER = {"lr": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def hyper(device: torch.device | str, **changed: float) -> torch.Tensor:
    """The learning rate, betas, eps and weight decay as the kernels take them, FP64, with the named ones changed."""
    return torch.tensor(hyper_numbers(Hyper(**{**HYPER, **changed})), dtype=torch.float64, device=device)


def adamw_batch(
    grads: list[torch.Tensor],
    ms: list[Any],
    vs: list[Any],
    masters: list[Any],
    *,
    step: float = 0.0,
    weight_remainders: list[torch.Tensor] | None = None,
    v_remainders: list[torch.Tensor] | None = None,
    **lists: Any,
) -> Batch:
    """Tensors that AdamW updates, at step `step` and in the order of their columns unless `lists` says otherwise."""
    beside = {"weight_remainder": weight_remainders, "exp_avg_sq_remainder": v_remainders}
    steps = [torch.tensor(step, device=g.device) for g in grads]
    order = {"weights": [], "steps": steps, "indices": list(range(len(grads))), "places": list(range(len(grads)))}
    states = {"exp_avg": ms, "exp_avg_sq": vs} | {key: column for key, column in beside.items() if column}
    return Batch(grads=grads, masters=masters, states=states, **(order | lists))


def stored(x: torch.Tensor, fmt: Format) -> Any:
    """FP32 values as a state keeps them in `fmt`."""
    if fmt.group:
        return quantize_expanded(x, fmt)
    return ScalingTensor.quantize(x, fmt, dtype=torch.float32) if fmt.scaled else x.to(fmt.dtype)


def values(x: Any) -> torch.Tensor:
    return x.dequantize() if isinstance(x, Expanded) else x.dequantize(torch.float32) if isinstance(x, ScalingTensor) else x.float()


def in_training(
    formats: StateFormats, weight: Format | None, device: torch.device | str, shapes: Sequence[tuple[int, ...]], wide: int = 0
) -> Batch:
    """Tensors in the midst of training, of magnitudes far apart; `wide` is added to their offsets."""

    def states(fmt: Format, seed: int, size: float, positive: bool = False) -> list[Any]:
        made = [make(KINDS[i % 3] if shape else "normal", shape or (1,), seed + i).view(shape) for i, shape in enumerate(shapes)]
        return [stored((x.square() if positive else x).to(device) * size * 2.0 ** (i - 3), fmt) for i, x in enumerate(made)]

    count = len(shapes)
    return adamw_batch(
        grads=states(formats.grad, 0, 1e-3),
        ms=states(formats.m, 20, 1e-3),
        vs=states(formats.v, 40, 1e-6, positive=True),
        masters=states(formats.master, 60, 0.1),
        weights=[] if weight is None else states(weight, 60, 0.1),
        steps=[torch.tensor(float(7 * i), device=device) for i in range(count)],
        indices=[2 * i for i in range(count)],
        places=[count - 1 - i for i in range(count)],
        keys=[tensor_key(i, "a weight") for i in range(count)],
        offsets=[wide + 1000 * i for i in range(count)],
    )


def amaxes_of(x: Batch, device: torch.device | str) -> torch.Tensor:
    """The table of amaxes of whole tensors, which may be larger than those of the pieces here; 0 for COAT's."""
    columns = (x.grads, x.ms, x.vs, x.masters)
    found = [
        [0.0 if isinstance(t, Expanded) or not values(t).numel() else float(values(t).abs().max()) for t in column] for column in columns
    ]
    table = torch.zeros(5, 2 * len(x.grads))
    table[:4, ::2] = torch.tensor(found)
    table[:, 2] *= 1.5
    return table.to(device)


def everything(x: Batch, kept: torch.Tensor) -> list[torch.Tensor]:
    """The bits in memory."""
    tensors = [t for column in (x.grads, x.ms, x.vs, x.masters, x.weights, x.steps) for t in column]
    parts = {Expanded: ("payload", "max", "k"), ScalingTensor: ("payload", "scale_inv")}
    flat = [part for t in tensors for part in ([getattr(t, name) for name in parts[type(t)]] if type(t) in parts else [t])]
    return [bits(part).clone() for part in (*flat, kept)]


def run_each(
    ways: Sequence[Callable[..., None]],
    before: Batch,
    device: torch.device | str,
    decoupled: bool = True,
    clip: float | None = 0.3,
    usable: bool = True,
    steps: int = 1,
    rounding: Rounding = NEAREST,
    **changed: float,
) -> list[tuple[Batch, torch.Tensor]]:
    """The batch and the amaxes kept, before and after some steps of each way."""
    results = [(before, torch.full((3, len(before.grads)), 7.0, device=device))]
    for run in ways:
        x, kept, tables = copy.deepcopy(before), results[0][1].clone(), Tables(torch.device(device))
        for _ in range(steps):
            coefficient = None if clip is None else torch.tensor(clip, device=device)
            flag = torch.tensor(usable, device=device)
            run(tables, x, hyper(device, **changed), amaxes_of(x, device), kept, coefficient, flag, decoupled=decoupled, rounding=rounding)
        results.append((x, kept))
    return results
