import torch

from msamp.nn.cast_scales import CastScales, just_in_time_scale, own_rule, scales_of_weights
from msamp.numerics.formats import E4M3
from msamp.numerics.recipe import Cast
from msamp.numerics.scaling import Current, Delayed, Exact, inverse, scale_from_amax

AMAXES = torch.tensor([0.0, 1.0, 3.0, 500.0])


def test_only_a_rule_without_history_that_kernels_do_not_know_is_its_own():
    assert [own_rule(Cast(E4M3, rule)) for rule in (Current(), Delayed(), Exact())] == [False, False, True]


def test_scales_just_in_time_are_those_of_the_rule():
    assert just_in_time_scale(Cast(E4M3, Current()), AMAXES).equal(scale_from_amax(AMAXES, E4M3.max))
    exact = just_in_time_scale(Cast(E4M3, Exact()), AMAXES[2])
    assert exact == Exact().next_scale(AMAXES[2:3], E4M3.max)


def test_a_stored_weight_goes_to_fp8_and_back_by_both_of_its_scales():
    stored = torch.tensor([1.0, 0.5, 2.0, 0.25])
    multiplier, scale_inv = scales_of_weights(Cast(E4M3, Current()), AMAXES, stored)
    scale = scale_from_amax(AMAXES * stored, E4M3.max)
    assert multiplier.equal(scale * stored)
    assert scale_inv.equal(inverse(scale))


def test_nobody_watches_by_default():
    assert CastScales(None, None, None).watch is None
