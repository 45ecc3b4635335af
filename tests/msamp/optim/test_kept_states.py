"""Which states an update keeps beside a parameter, and the requirements on saved ones."""

import torch
from torch import nn

from msamp.numerics.formats import E4M3, FP16, FP32
from msamp.numerics.recipe import O1, O2, O3, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.kept_states import expected_states, kept_states, update_of
from msamp.optim.updates import format_names


def kept(p: torch.Tensor, states: StateFormats) -> dict[str, str]:
    return {state.key: fmt.name for state, fmt in kept_states(p, format_names(states))}


def test_a_master_is_kept_where_the_weight_is_stored_otherwise():
    values = torch.randn(4, 16)
    moments = {"exp_avg": "fp8-e4m3", "exp_avg_sq": "fp16"}
    assert kept(ScalingTensor.quantize(values, FP16), O2.states) == moments
    assert kept(ScalingTensor.quantize(values, E4M3), O3.states) == {"master": "fp16"} | moments
    assert kept(nn.Parameter(values), O2.states.varied(master=FP32)) == moments
    assert kept(nn.Parameter(values.bfloat16()), O1.states) == {"master": "fp16", "exp_avg": "fp32", "exp_avg_sq": "fp32"}


def test_requirements_on_what_was_saved():
    expected = expected_states(torch.randn(4, 16), format_names(O2.states), torch.Size([2, 16]))
    assert {key: tuple(each.like.shape) for key, each in expected.items()} == {
        "step": (),
        "master": (2, 16),
        "exp_avg": (2, 16),
        "exp_avg_sq": (2, 16),
    }
    assert [expected[key].least for key in ("step", "exp_avg", "exp_avg_sq")] == [0.0, float("-inf"), 0.0]


def test_an_update_is_found_by_its_name():
    assert update_of(format_names(O2.states)).name == "fp32"
    assert update_of(format_names(StateFormats(update="sgd"))).name == "sgd"
