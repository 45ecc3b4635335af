"""The rules for values of tensors, against values that were put there; whole checkpoints: test_damage.py and tests/attack."""

import math

import pytest
import torch

from helpers.choices import every_value
from megatron.lm.checkpoint import tensor_rules
from megatron.lm.checkpoint.tensor_rules import extents, number_problem, tensor_problem
from msamp.numerics.formats import FP32

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extents_are_those_of_the_values(dtype: torch.dtype):
    codes = torch.arange(2 ** (8 * min(2, dtype.itemsize)))
    every = codes.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.randn(1000).to(dtype)
    finite = every[every.float().isfinite()]
    for x in (finite, finite[finite.float() >= 0], finite[finite.float() <= 0], finite[:0], finite[:1].reshape(())):
        low, high = extents(x).tolist()
        values = [0.0, *x.float().reshape(-1).tolist()]
        assert (low, high) == (min(values), max(values))
    assert extents(finite.reshape(-1, 2).t()).tolist() == extents(finite).tolist()


@every_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
def test_one_value_that_is_not_finite_shows(dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_rules, "_BLOCK", 4)
    x = torch.ones(10)
    x[9] = value
    if dtype is torch.float8_e4m3fn:
        x = x.nan_to_num(math.nan, math.nan, math.nan)  # this format has no infinity
    x = x.half().view(torch.uint8)[1::2].view(dtype) if dtype is torch.float8_e5m2 else x.to(dtype)
    assert tensor_problem(x, extents(x).tolist()) == " has 1 values that are NaN or infinite"


@pytest.mark.parametrize(
    ("value", "scales", "words"),
    [
        (2.0**64, [], None),
        (1e38, [], " has the value 1e+38; no run can use values above 2^64"),
        (-1e38, [], " has the value -1e+38; no run can use values above 2^64"),
        (3.0, [2.0**63], " has the value 2.76701e+19; no run can use values above 2^64"),
        (1.0, [2.0**-126], None),
        *((1.0, [bad], " has scale_inv ") for bad in (0.0, -1.0, 0.75, 2.0**127, math.inf, math.nan)),
    ],
)
def test_values_and_scales_that_no_run_can_use(value: float, scales: list[float], words: str | None):
    x = torch.tensor([0.5, value])
    problem = tensor_problem(x, extents(x).tolist(), scales)
    assert problem == words if words is None else problem is not None and problem.startswith(words)


def test_a_mean_of_squares_is_not_negative():
    x = torch.tensor([0.5, -2.0, -3.0])
    assert tensor_problem(x, extents(x).tolist(), [2.0]) is None
    words = ", a mean of squares, has 2 negative values, such as -6"
    assert tensor_problem(x, extents(x).tolist(), [2.0], non_negative=True) == words
    zero = torch.tensor([-0.0, 1.0])
    assert tensor_problem(zero, extents(zero).tolist(), non_negative=True) is None


@pytest.mark.parametrize(
    ("maxima", "exponents", "words"),
    [
        ([0.0, 3.0], [FP32.tiny, 1.0], None),
        ([-1.0, 3.0], [0.5, 1.0], "maximum -1"),
        ([0.0, math.nan], [0.5, 1.0], "maximum nan"),
        ([0.0, 1e38], [0.5, 1.0], r"maximum 1e+38"),
        ([0.0, 3.0], [0.0, 1.0], "exponent 0"),
        ([0.0, 3.0], [0.5, math.inf], "exponent inf"),
    ],
)
def test_groups_with_impossible_numbers(maxima: list[float], exponents: list[float], words: str | None):
    problem = tensor_problem(torch.ones(2), [0.0, 1.0], groups=(maxima, exponents))
    assert problem is None if words is None else problem is not None and problem.endswith(f"out of range: {words}")


@pytest.mark.parametrize("value", [-1.0, 2.5, 5.0, math.nan, math.inf])
def test_a_count_is_a_whole_number_in_its_range(value: float):
    assert number_problem(4.0, 0, 4, torch.float32, whole=True) is None
    assert number_problem(2.5, 0, 4, torch.float32) is None
    words = f" is {value}; it must be one torch.float32 in [0, 4] without a fraction"
    assert number_problem(value, 0, 4, torch.float32, whole=True) == words
