"""AdamW with BF16 arithmetic and weight and second moment as pairs of BF16 (Collage, algorithm 2), and the options of its Table 2."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from msamp.kernels.reference.adamw import Batch, Hyper
from msamp.kernels.tables import Tables
from msamp.numerics import mcf


class Variant(NamedTuple):
    """One precision option.

    Attributes:
        dtype: of m, v and the arithmetic of the update; scalars are computed in FP64 and rounded to it.
        weight: the addition to the BF16 weight: "nothing", "pair" (a second component), "kahan" (a compensation), "master" (FP32).
        pair_v: whether v and beta2 are pairs.
        remainder: dtype in which second components are stored (`mcf.remainder_payload`); the arithmetic uses BF16.
        published: eps is added below the root, and v by Fast2Sum, as algorithm 2 has them. Fast2Sum loses the error of the sum where
            a squared gradient is larger than v.
    """

    dtype: torch.dtype
    weight: str
    pair_v: bool = False
    remainder: torch.dtype = torch.bfloat16
    published: bool = False


VARIANTS = {
    "a": Variant(torch.bfloat16, "nothing"),
    "light": Variant(torch.bfloat16, "pair"),
    "plus": Variant(torch.bfloat16, "pair", pair_v=True),
    "fp8": Variant(torch.bfloat16, "pair", pair_v=True, remainder=torch.float8_e4m3fn),
    "kahan": Variant(torch.bfloat16, "kahan"),
    "light-published": Variant(torch.bfloat16, "pair", published=True),
    "plus-published": Variant(torch.bfloat16, "pair", pair_v=True, published=True),
    "d-mw": Variant(torch.float32, "nothing"),
    "d": Variant(torch.float32, "master"),
}


def collage(
    tables: Tables | None,
    batch: Batch,
    hyper: torch.Tensor,
    update: str,
    coefficient: torch.Tensor | None,
    usable: torch.Tensor,
) -> None:
    """Take one step with BF16 arithmetic on many tensors, or do nothing if the step is not usable.

    Args:
        tables: stores the kernel's table of addresses; the twin needs none.
        batch: plain BF16 tensors; the masters are the weights. `weight_remainders` and `v_remainders` as `update` requires.
        hyper: FP64 [5 or more], a `Hyper`; the decay is AdamW's.
        update: a BF16 row of `VARIANTS`.
        coefficient: FP32 0-dim, the factor of the gradients: the FP32 product is rounded to BF16; None: 1.
        usable: bool 0-dim, whether to take the step.
    """
    if not bool(usable):
        return
    numbers, variant = Hyper(*hyper.tolist()[:5]), VARIANTS[update]
    torch._foreach_add_(batch.steps, 1)
    for i, (weight, g) in enumerate(zip(batch.masters, batch.grads, strict=True)):
        state = {"exp_avg": batch.ms[i], "exp_avg_sq": batch.vs[i]}
        if variant.weight != "nothing":
            state["weight_remainder"] = batch.weight_remainders[i]
        if variant.pair_v:
            state["exp_avg_sq_remainder"] = batch.v_remainders[i]
        clipped = g if coefficient is None else (g.float() * coefficient).to(g.dtype)
        step_(weight, clipped, state, int(batch.steps[i]), numbers, variant)


def step_(
    weight: torch.Tensor,
    g: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    step: int,
    hyper: Hyper,
    variant: Variant,
) -> torch.Tensor:
    """Take one step on one tensor, in place (Collage, algorithm 2).

    Args:
        weight, g: BF16, of one shape; `g` is only read.
        state: `exp_avg`, `exp_avg_sq` in the variant's dtype; by variant `weight_remainder`, `exp_avg_sq_remainder` in its
            `remainder`, `master` in FP32.
        step: number of this step, from 1.
        hyper: the group's hyperparameters.
        variant: the precision option.

    Returns:
        The exact update of the weight, in the variant's dtype.
    """

    def scalar(x: float) -> float:
        return torch.tensor(x, dtype=torch.float64, device="cpu").to(variant.dtype).item()

    m, v, beta1, beta2 = state["exp_avg"], state["exp_avg_sq"], hyper.beta1, hyper.beta2
    theta, g = state.get("master", weight).to(variant.dtype), g.to(variant.dtype)
    m.copy_(m * scalar(beta1) + g * scalar(1 - beta1))
    squares = g * g * scalar(1 - beta2)
    if variant.pair_v:
        rest = state["exp_avg_sq_remainder"]
        add = mcf.fast_two_sum if variant.published else mcf.two_sum
        _store(v, rest, mcf.grow(mcf.mul(mcf.expansion(beta2), mcf.load_pair(v, rest)), squares, add))
    else:
        v.copy_(v * scalar(beta2) + squares)
    m_hat, v_hat = m / scalar(1 - power(beta1, step)), v / scalar(1 - power(beta2, step))
    eps = scalar(hyper.eps)
    root = (v_hat + eps).sqrt() if variant.published else v_hat.sqrt() + eps
    delta = (m_hat / root + theta * scalar(hyper.weight_decay)) * scalar(-hyper.lr)
    if variant.weight == "master":
        weight.copy_(state["master"].add_(delta))
    elif variant.weight == "nothing":
        weight.copy_(weight + delta)
    else:
        pair = mcf.load_pair(weight, state["weight_remainder"])
        new = mcf.grow(pair, delta, mcf.fast_two_sum) if variant.weight == "pair" else mcf.fast_two_sum(weight, pair[1] + delta)
        _store(weight, state["weight_remainder"], new)
    return delta


def power(base: float, exponent: int) -> float:
    """Return `base` to an integer power >= 0 by squaring, with FP64 products in the kernel's order, so that both give the same bits."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result


def _store(first: torch.Tensor, remainder: torch.Tensor, new: mcf.Pair) -> None:
    first.copy_(new[0])
    remainder.copy_(mcf.remainder_payload(new, remainder.dtype))
