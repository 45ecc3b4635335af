"""Collage in your own loop (Lee et al. 2024): AdamW on BF16 weights that keeps the rounding errors of BF16, and a measure of its quality.

`collage_adamw` returns a `LowPrecisionOptimizer` with the formats of an option of Collage's Table 2. The arithmetic is in
`msamp.kernels.reference.collage`. The update is delta = -lr (m^ / (sqrt(v^) + eps) + weight_decay theta), including the decay. The last
column is the bytes per parameter of weight, gradient and all states:

| variant | the paper's option | m, v | weight | bytes |
| --- | --- | --- | --- | --- |
| "a" | A | BF16 | BF16 | 8 |
| "light" | B, Collage-light | BF16 | pair of BF16, theta = Grow(theta, delta) | 10 |
| "kahan" | BF16-Kahan | BF16 | BF16 + compensation: Fast2Sum(theta, compensation + delta) | 10 |
| "plus" | C, Collage-plus | BF16; v a pair, v = Grow(Mul(beta2, v), (1 - beta2) g^2) | as light | 12 |
| "fp8" | none: plus, remainders in E4M3 | BF16; v a pair of BF16 and E4M3 | as v | 10 |
| "d-mw" | D without master weights | FP32 | BF16 | 12 |
| "d" | D | FP32 | BF16 + FP32 master | 16 |

The BF16 variants round each elementary operation to BF16. Betas are rounded to BF16 too, 0.999 to 1, except beta2 of "plus" and "fp8". The
model computes with the first component of a pair, and v^ uses the first component of v. `mcf.remainder_payload` defines a remainder in
E4M3. An update below 2^-13 of its weight, such as a decay of 1e-4, may be lost in "fp8", below 2^-17 in the other pairs.

`update_quality` measures what is lost. The effective descent quality EDQ = <delta / |delta|, theta' - theta> [definition 3.3] is at most
the norm of the update, and lost arithmetic [Figure 3] is the fraction of weights that a non-zero update leaves unchanged.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from msamp.kernels.reference.adamw import Hyper
from msamp.kernels.reference.collage import VARIANTS, step_
from msamp.numerics import mcf, metrics
from msamp.numerics.recipe import COLLAGE_FORMATS, StateFormats
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.updates import format_names


def collage_adamw(
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    variant: str = "plus",
    **settings: Any,
) -> LowPrecisionOptimizer:
    """Return AdamW for BF16 parameters and gradients with an option of Collage.

    Args:
        params: BF16 parameters or groups; a group may have its own `variant`.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        variant: a row of the table above.
        settings: other arguments of `LowPrecisionOptimizer`, such as `clip_grad` and `shard`.

    Raises:
        ValueError: if the variant is unknown, a number is out of range, or a parameter is not a plain BF16 tensor.
    """
    groups = list(params)
    for group in (group for group in groups if isinstance(group, dict) and "variant" in group):
        group["formats"] = _formats(group.pop("variant"))
    return LowPrecisionOptimizer(groups, lr, betas, eps, weight_decay, formats=_formats(variant), **settings)


def _formats(variant: str) -> StateFormats:
    if variant not in COLLAGE_FORMATS:
        raise ValueError(f"variant {variant!r} is unknown; choose one of {', '.join(COLLAGE_FORMATS)}")
    return COLLAGE_FORMATS[variant]


class UpdateQuality(NamedTuple):
    """How much of an update rounding preserves, over all parameters of an optimizer.

    Attributes:
        edq: effective descent quality; a pair, or a weight with compensation or master, counts with its full value.
        lost_frac: lost arithmetic, 0 to 1.
        norm: of the exact update, equal to `edq` if nothing is lost.
    """

    edq: float
    lost_frac: float
    norm: float


@torch.no_grad()
def update_quality(optimizer: LowPrecisionOptimizer) -> UpdateQuality:
    """Run the next update on copies, in the variant's own arithmetic, and measure its quality. Call it between `backward` and `step`.

    It requires 16 bytes per parameter, waits for the device and changes nothing. Gradients are not clipped.

    Raises:
        ValueError: if no parameter has a gradient and states, as before the first step, or the optimizer has another update.
    """
    wanted, effective = [], []
    names = [(format_names(formats), name) for name, formats in COLLAGE_FORMATS.items()]
    for holding in optimizer.ready():
        state = {key: x.clone() for key, x in optimizer.state.get(holding.weight, {}).items()}
        variant = next((VARIANTS[name] for formats, name in names if dict(holding.formats) == formats), None)
        if variant is None:
            raise ValueError(f"update {holding.formats['update']!r} is not one of Collage's; build the optimizer by msamp.collage_adamw")
        if state:
            weight, group = holding.weight.detach().clone(), holding.group
            beta1, beta2 = group["betas"]
            before, hyper = _value(weight, state), Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
            assert holding.grad is not None
            delta = step_(weight, holding.grad, state, int(state["step"]) + 1, hyper, variant)
            wanted.append(delta.double().flatten())
            effective.append((_value(weight, state) - before).flatten())
    if not wanted:
        raise ValueError("no parameter has a gradient and states; call update_quality after backward, from the second step on")
    update, arrived = torch.cat(wanted), torch.cat(effective)
    return UpdateQuality(metrics.edq(update, arrived), metrics.lost_frac(update, arrived), float(update.norm()))


def _value(weight: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the full value of a weight, in FP64."""
    if "weight_remainder" in state:
        first, second = mcf.load_pair(weight, state["weight_remainder"])
        return first.double() + second
    return state.get("master", weight).double()
