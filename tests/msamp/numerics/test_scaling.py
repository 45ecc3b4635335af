from fractions import Fraction

import numpy as np
import pytest
import torch

from helpers.definitions import AmaxHistory
from helpers.numerics import floats, golden
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.scaling import Current, Delayed, inverse, scale_from_amax

FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "fp16": FP16}


def exact_exponent(amax: float, fp_max: float) -> int:
    """The largest e with amax * 2^e <= fp_max, in rational arithmetic."""
    a, m = Fraction(amax), Fraction(fp_max)
    e = 0
    while a * Fraction(2) ** e <= m:
        e += 1
    while a * Fraction(2) ** e > m:
        e -= 1
    return e


@pytest.mark.parametrize("name", FORMATS)
def test_scale_is_the_exact_power_of_two_next_to_every_power_of_two(name):
    fp_max = FORMATS[name].max
    near = []
    for k in range(-149, 128):
        for base in (2.0**k, fp_max * 2.0 ** (k - 8)):
            value = np.float32(base) if base < 3.4e38 else np.float32(3e38)
            near += [np.nextafter(value, np.float32(0)), value, np.nextafter(value, np.float32(3.4e38))]
    amax = np.array([v for v in near if v > 0], dtype=np.float32)
    scale = scale_from_amax(torch.from_numpy(amax), fp_max)
    want = [2.0 ** max(-126, min(126, exact_exponent(float(a), fp_max))) for a in amax]
    assert scale.dtype == torch.float32
    assert scale.tolist() == want


@pytest.mark.parametrize("name", FORMATS)
def test_golden_scales(name):
    vectors = golden("scale")
    got = scale_from_amax(floats(vectors["amax"]), FORMATS[name].max, vectors["last"])
    assert got.tolist() == floats(vectors[name]).tolist()


def test_the_exponent_is_clamped():
    tiny, huge = torch.tensor([2.0**-149, 2.0**-126]), torch.tensor([3.4e38])
    assert scale_from_amax(tiny, E5M2.max).tolist() == [2.0**126] * 2
    assert scale_from_amax(huge, 2.0**-20).tolist() == [2.0**-126]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), -float("inf"), float("nan")])
def test_an_amax_that_says_nothing_keeps_the_last_scale(bad):
    amax = torch.tensor([bad, 10.0])
    assert scale_from_amax(amax, E4M3.max, 8.0).tolist() == [8.0, 32.0]
    assert scale_from_amax(amax, E4M3.max, torch.tensor([4.0, 2.0])).tolist() == [4.0, 32.0]
    assert scale_from_amax(amax, E4M3.max).tolist() == [1.0, 32.0]


@pytest.mark.gpu
def test_no_host_sync_on_the_device():
    amax, last = torch.tensor([10.0, 0.0], device="cuda"), torch.tensor([1.0, 4.0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        scale = scale_from_amax(amax, E4M3.max, last)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scale.tolist() == [32.0, 4.0]


def test_inverse_is_exact_over_the_whole_range():
    scale = torch.tensor([2.0**e for e in range(-126, 127)])
    assert (scale * inverse(scale)).eq(1).all()
    assert inverse(inverse(scale)).equal(scale)


def test_golden_delayed():
    vectors = golden("delayed")
    history = AmaxHistory(Delayed(vectors["window"]), E4M3)
    assert [float(history.step(a)) for a in floats(vectors["amax"])] == floats(vectors["e4m3"]).tolist()


def test_delayed_scaling_is_just_in_time_until_the_window_is_filled_and_forgets_after_it():
    history = AmaxHistory(Delayed(4), E4M3)
    scales = [float(history.step(torch.tensor(a))) for a in (448.0, 1.75, 1.75, 1.75, 448.0 * 2, 1.75, 1.75, 1.75, 1.75, 1.75)]
    assert scales == [1, 256, 256, 256, 1, 0.5, 0.5, 0.5, 0.5, 256]


def test_the_algorithm_chooses_the_amax_and_the_margin_leaves_room():
    history = torch.tensor([[8.0, 2.0, 1.0], [0.5, 0.25, 448.0]])
    assert Delayed(3).next_scale(history, E4M3.max).tolist() == [32.0, 1.0]
    assert Delayed(3, "most_recent").next_scale(history, E4M3.max).tolist() == [256.0, 1.0]
    assert Delayed(3, margin=2).next_scale(history, E4M3.max).tolist() == [8.0, 0.25]
    assert Current().next_scale(history[:, -1:], E4M3.max).tolist() == [256.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "word"), [({"algorithm": "mean"}, "max, most_recent"), ({"margin": -1}, r"\[0, 16\]"), ({"margin": 17}, r"\[0, 16\]")]
)
def test_delayed_scaling_refuses_what_it_cannot_do(settings, word):
    with pytest.raises(ValueError, match=word):
        Delayed(**settings)
