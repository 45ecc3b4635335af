"""Means over ranks, packed with a guess; gradients packed so are in test_bucket.py."""

import pytest
import torch

from helpers.numerics import bits, make
from msamp.comm.bucket import GuessedPack
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.quantize import quantize

SPANS = [(0, 0, 40, 0), (2, 40, 25, 40)]  # the second of three tensors has no run
SCALES = [torch.tensor([2.0, 1.0, 0.25]), torch.tensor([2.0, 1.0, 0.25]), torch.tensor([4.0, 8.0, 0.25])]  # no guess, as before, another


def payloads(ranks: int, fmt) -> torch.Tensor:
    return torch.stack([make("log-normal", (65,), rank).clamp(-400, 400) for rank in range(ranks)]).to(fmt.dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
def test_a_mean_is_summed_in_fp32_and_rounded_once_whatever_the_guess(fmt, ranks):
    packed = GuessedPack(SPANS, 3, torch.device("cpu"), tallied=False)
    for factor in SCALES:
        x = payloads(ranks, fmt)
        mean = x[0].float()
        for row in x[1:]:
            mean = mean + row.float()
        mean = mean / ranks
        amaxes = packed.measure([x] * 3, fmt, ranks=ranks)
        assert amaxes.tolist() == [mean[:40].abs().max().item(), 0.0, mean[40:].abs().max().item()]
        out = packed.pack([x] * 3, fmt, factor, ranks=ranks)
        want = torch.cat([quantize(mean[:40], factor[0], fmt), quantize(mean[40:], factor[2], fmt)])
        assert bits(out).equal(bits(want))
        assert packed.tallies(out) is None


def test_a_payload_that_is_not_finite_on_one_rank_makes_the_amax_infinite():
    packed, x = GuessedPack(SPANS, 3, torch.device("cpu"), tallied=False), payloads(3, E4M3)
    x[1, 50] = float("nan")
    assert packed.measure([x] * 3, E4M3, ranks=3).isinf().tolist() == [False, False, True]
