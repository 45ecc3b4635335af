"""Samples of products, and shares of energy in a mean."""

from collections import defaultdict

import torch

from helpers.numerics import make
from msamp.numerics.accumulation import judge_sums
from msamp.numerics.formats import E4M3
from tools.bench.bench_accumulation import codes, compare, mean_share


def test_fast_accumulation_loses_sums_of_one_sign_and_full_does_not():
    tallies = defaultdict(list)
    a, b = (codes(make("normal", (24, 4096), seed=n).abs(), E4M3) for n in range(2))
    compare(tallies, "layer", "output", a, b)
    slopes = {name[3]: judge_sums(rows[0].tolist())[0] for name, rows in tallies.items()}
    assert 0.9 < slopes["fast"] < 0.95
    assert slopes["full"] > 0.999


def test_the_share_of_a_mean():
    x = torch.tensor([[1.0, 3.0], [-1.0, 3.0]])
    torch.testing.assert_close(mean_share(x), 0.9)
