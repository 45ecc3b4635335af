"""What gradients decide: the fields of a GradientDecision as an optimizer fills them."""

import pytest
import torch
from torch import nn

from msamp.numerics.recipe import FP32_STATES
from msamp.optim.decision import GradientDecision
from msamp.optim.optimizer import FP8AdamW


def decided(gradients: list[list[float]], **settings) -> GradientDecision:
    ps = [nn.Parameter(torch.ones(len(g))) for g in gradients]
    optimizer = FP8AdamW(ps, formats=FP32_STATES, **settings)
    for p, g in zip(ps, gradients, strict=True):
        p.grad = torch.tensor(g)
    ready = optimizer.ready()
    for holding in ready:
        optimizer._init_state(holding)
    return optimizer.decide(ready)


def test_amaxes_norm_and_coefficient():
    decision = decided([[3.0, -1.0], [0.5]], clip_grad=1.0)
    assert decision.amaxes[0].tolist() == [3.0, 0.5]
    assert float(decision.norm) == pytest.approx((9 + 1 + 0.25) ** 0.5)
    assert float(decision.coefficient) == pytest.approx(1 / (float(decision.norm) + 1e-6))
    assert bool(decision.usable)
    assert decided([[3.0]]).coefficient is None


@pytest.mark.parametrize(
    ("value", "clip", "usable"), [(float("nan"), 1.0, False), (float("inf"), None, False), (1e30, None, False), (1e30, 1.0, True)]
)
def test_a_step_is_usable_where_its_squares_are_finite_or_clipped(value, clip, usable):
    assert bool(decided([[value]], clip_grad=clip).usable) == usable
