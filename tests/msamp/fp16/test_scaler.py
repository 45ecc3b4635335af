"""The loss scale, against torch's GradScaler and against bad input."""

import math

import pytest
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import nn

from helpers.choices import each_value
from megatron.lm.processes.cpu_home import cpu_home
from msamp.fp16.scaler import LossScaler

CPU = torch.device("cpu")
PATTERNS = {
    "quiet": [False] * 12,
    "burst": [True, True, False, False, False, True, False, False, False, False, False, False, True],
    "every other": [True, False] * 6,
    "at the interval": [False, False, True, False, False, False, True, False, False, False],
}


def scales(scaler: LossScaler, pattern: list[bool]) -> list[float]:
    found = []
    for overflow in pattern:
        scaler.update(torch.tensor(overflow))
        found.append(scaler.scale(CPU).item())
    return found


def scales_of_grad_scaler(pattern: list[bool], interval: int) -> list[float]:
    """What torch.amp.GradScaler goes through where the gradients overflow in the same steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    found = []
    for overflow in pattern:
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (math.inf if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_scale_moves_as_torchs_grad_scaler_moves_it(pattern):
    got = scales(LossScaler(growth_interval=3), pattern)
    assert got == scales_of_grad_scaler(pattern, 3)
    assert len(set(got)) > 1, "the pattern moved nothing"


@each_value(hysteresis=[1, 2, 3], pattern=PATTERNS.values())
def test_hysteresis_counts_as_megatron_cores_scaler(pattern, hysteresis):
    with cpu_home():
        theirs, want = DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 3, hysteresis), []
        for overflow in pattern:
            theirs.update(overflow)
            want.append(float(theirs.scale))
    assert scales(LossScaler(growth_interval=3, hysteresis=hysteresis), pattern) == want


def test_a_saved_scaler_goes_on_where_it_was():
    pattern = PATTERNS["burst"]
    whole = scales(LossScaler(growth_interval=3, hysteresis=2), pattern)
    first, second = LossScaler(growth_interval=3, hysteresis=2), LossScaler(growth_interval=3, hysteresis=2)
    scales(first, pattern[:7])
    assert first.state_dict() == {"loss_scale": 65536.0, "unskipped": 1, "overflows_left": 1}
    second.load_state_dict(first.state_dict())
    assert scales(second, pattern[7:]) == whole[7:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": 0}, r'loss_scale is 0; it must be "dynamic" or a number greater than 0'),
        ({"loss_scale": "fast"}, "loss_scale is 'fast'"),
        ({"loss_scale": math.inf}, "loss_scale is inf"),
        ({"loss_scale": math.nan}, "loss_scale is nan"),
        ({"growth_interval": 0}, "growth_interval is 0; it must be at least 1"),
        ({"hysteresis": 0}, "hysteresis is 0; it must be at least 1"),
        ({"init_scale": 2.0**30}, "with the start between the other two"),
        ({"min_loss_scale": 0.0}, "min_loss_scale 0.0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LossScaler(**options)
