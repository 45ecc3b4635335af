"""What SGD and Muon refuse, and their first steps by hand. Against torch's: tests/msamp/integrations/test_initialize_optimizers.py."""

import pytest
import torch
from torch import nn

from msamp.numerics.formats import FP32
from msamp.numerics.recipe import StateFormats
from msamp.optim.optimizer import LowPrecisionOptimizer


def built(update: str, p: torch.Tensor, **options) -> LowPrecisionOptimizer:
    formats = StateFormats(FP32, FP32, FP32, FP32, update)
    return LowPrecisionOptimizer([nn.Parameter(p)], lr=0.5, weight_decay=0.0, formats=formats, **options)


def test_two_steps_of_momentum_by_hand():
    optimizer = built("sgd-momentum", torch.ones(3), momentum=0.5)
    (p,) = optimizer.param_groups[0]["params"]
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    assert p.tolist() == [1 - 0.5 * 1 - 0.5 * 1.5] * 3
    assert optimizer.state[p]["momentum_buffer"].tolist() == [1.5] * 3


@pytest.mark.parametrize("update", ["sgd", "sgd-momentum"])
def test_a_step_that_is_not_usable_changes_nothing(update):
    optimizer = built(update, torch.ones(3))
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.tensor([1.0, float("nan"), 1.0])
    optimizer.step()
    assert p.tolist() == [1.0] * 3
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize(
    ("update", "options", "message"),
    [
        ("sgd", {"momentum": 0.9}, "update 'sgd' has no momentum state"),
        ("sgd-momentum", {"nesterov": True, "dampening": 0.1}, "it requires a momentum above 0 and dampening 0"),
        ("muon", {"ns_steps": 100}, r"ns_steps is 100; it must be in \[0, 100\)"),
        ("muon", {"decoupled": False}, "update 'muon' only supports decoupled decay"),
    ],
)
def test_options_out_of_range_are_refused(update, options, message):
    with pytest.raises(ValueError, match=message):
        built(update, torch.ones(4, 4), **options)
