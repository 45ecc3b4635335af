"""Collage in a loop of your own: AdamW on BF16 weights that keeps what BF16 rounds away, and how well it does (Lee et al. 2024).

`collage_adamw` is the one optimizer of this library (`FP8AdamW`) with the formats of an option of Collage's Table 2. Its arithmetic is in
`msamp.kernels.reference.collage`. The update is delta = -lr (m^ / (sqrt(v^) + eps) + weight_decay theta), the decay inside; bytes per
parameter are those of weight, gradient and all states:

| variant | the paper's option | m, v | weight | bytes |
| --- | --- | --- | --- | --- |
| "a" | A | BF16 | BF16 | 8 |
| "light" | B, Collage-light | BF16 | pair of BF16, theta = Grow(theta, delta) | 10 |
| "kahan" | BF16-Kahan | BF16 | BF16 + compensation: Fast2Sum(theta, compensation + delta) | 10 |
| "plus" | C, Collage-plus | BF16; v a pair, v = Grow(Mul(beta2, v), (1 - beta2) g^2) | as light | 12 |
| "fp8" | none: plus, remainders in E4M3 | BF16; v a pair of BF16 and E4M3 | as v | 10 |
| "d-mw" | D without master weights | FP32 | BF16 | 12 |
| "d" | D | FP32 | BF16 + FP32 master | 16 |

Each elementary operation of the BF16 variants is rounded to BF16. A beta that BF16 cannot hold is rounded too, 0.999 to 1, but for beta2 of
"plus" and "fp8". The model computes with the first component of a pair, and v^ is that of v's first. How E4M3 holds a remainder:
`mcf.remainder_payload`. An update below 2^-13 of a weight may be lost in "fp8", below 2^-17 in the other pairs.

`update_quality` measures the loss: the effective descent quality EDQ = <delta / |delta|, theta' - theta> [definition 3.3] is at best the
norm of the update, and lost arithmetic [Figure 3] is the share of weights that a non-zero update leaves unchanged.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from msamp.kernels.reference.adamw import Hyper
from msamp.kernels.reference.collage import VARIANTS, step_
from msamp.numerics import mcf, metrics
from msamp.numerics.recipe import COLLAGE_FORMATS, StateFormats
from msamp.optim.optimizer import FP8AdamW
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
) -> FP8AdamW:
    """AdamW on BF16 parameters and gradients by an option of Collage.

    Args:
        params: BF16 parameters or groups; a group may carry a `variant` of its own.
        lr, betas, eps, weight_decay: as torch.optim.AdamW.
        variant: see above.
        settings: of `FP8AdamW`, such as `clip_grad` and `shard`.

    Raises:
        ValueError: for an unknown variant, a number out of range, and a parameter that is not a plain BF16 tensor.
    """
    groups = list(params)
    for group in (group for group in groups if isinstance(group, dict) and "variant" in group):
        group["formats"] = _formats(group.pop("variant"))
    return FP8AdamW(groups, lr, betas, eps, weight_decay, formats=_formats(variant), **settings)


def _formats(variant: str) -> StateFormats:
    if variant not in COLLAGE_FORMATS:
        raise ValueError(f"variant {variant!r} is unknown; choose one of {', '.join(COLLAGE_FORMATS)}")
    return COLLAGE_FORMATS[variant]


class UpdateQuality(NamedTuple):
    """How much of an update arrives, over all parameters of an optimizer.

    Attributes:
        edq: effective descent quality; that of a pair, or of a weight with compensation or master, is that of its value.
        lost_frac: lost arithmetic.
        norm: of the update as it was wanted: `edq` where nothing is lost.
    """

    edq: float
    lost_frac: float
    norm: float


@torch.no_grad()
def update_quality(optimizer: FP8AdamW) -> UpdateQuality:
    """Run the next update on copies, in the variant's own arithmetic, and measure what arrives. Call it between `backward` and `step`.

    It takes 16 bytes per parameter, waits for the device and changes nothing. Gradients are taken as they are, before clipping.

    Raises:
        ValueError: where no parameter has a gradient and states, as before the first step, and for an optimizer of another update.
    """
    wanted, effective = [], []
    names = [(format_names(formats), name) for name, formats in COLLAGE_FORMATS.items()]
    for holding in optimizer.ready():
        state = {key: x.clone() for key, x in optimizer.state.get(holding.weight, {}).items()}
        variant = next((VARIANTS[name] for formats, name in names if dict(holding.formats) == formats), None)
        if variant is None:
            raise ValueError(f"update {holding.formats['update']!r} is not Collage's; build the optimizer by msamp.collage_adamw")
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
    """The value of a weight, in FP64."""
    if "weight_remainder" in state:
        first, second = mcf.load_pair(weight, state["weight_remainder"])
        return first.double() + second
    return state.get("master", weight).double()
