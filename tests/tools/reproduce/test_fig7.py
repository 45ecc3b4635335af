import math

import pytest
import torch

from helpers.numerics import make
from msamp.comm.grad_scaling import MU_MAX, AutoScale
from msamp.numerics.formats import E4M3
from msamp.numerics.quantize import quantize
from tools.reproduce import fig7


@pytest.mark.parametrize("limit", [0.02, 0.3, 0.9, 1.7, 5.0])
def test_mu_by_its_threshold_is_mu_measured_in_every_step(limit):
    threshold = fig7.mu_threshold(lambda mu: mu > limit, ranks=16)
    assert threshold == pytest.approx(min(limit, MU_MAX * fig7.GROWTH), rel=1e-3)
    scale = AutoScale([1], ranks=16)
    for _ in range(700):
        at_max = torch.tensor([2 if scale.mu > limit else 0])
        scale.update(at_max, at_max, torch.tensor([True]))
    mu = fig7.adapted_mu(torch.tensor([threshold], dtype=torch.float64), 16, 700)
    assert mu.item() == pytest.approx(scale.mu.item(), rel=0.01)  # a few steps of growth apart


def test_mu_falls_until_the_sum_no_longer_exceeds_and_by_the_papers_rule_to_a_half_alone():
    gradients = torch.ones(8, 4, 4).bfloat16()  # on every rank the same: the sum is 8 times the scaled maximum
    (threshold,) = thresholds = fig7.mu_thresholds([gradients])
    assert 0.8 * 448 / (8 * 256) < threshold <= 448 / (8 * 256)  # the hops round upwards too
    assert 1 / 16 < fig7.adapted_mu(thresholds, 8, steps=20) <= threshold
    assert fig7.adapted_mu(thresholds, 8, steps=20, rule="paper") == 0.5


def test_a_block_is_measured_as_its_definition_says():
    """4 ranks; the first weight's gradients are alike, so that their sum saturates, the second's have no common part; 5 steps of mu, which
    the earlier batches, twice as large in sum, leave lower."""
    alike = make("log-normal", (1, 24, 16)).clamp(-30, 30).expand(4, -1, -1) * 1e-3
    apart = torch.stack([make("log-normal", (8, 16), seed=rank) for rank in range(4)]) * 1e-5
    blocks, earlier = (alike, apart), (torch.ones(4, 24, 16), torch.ones(4, 8, 16))
    found = {row["strategy"]: row for row in fig7.measure_block(blocks, earlier, mu_steps=5)}
    scales = [2.0 ** math.floor(math.log2(448 / float(g.abs().max()))) for g in blocks]
    mus = {}
    for name, rule in fig7.RULES.items():
        thresholds = fig7.mu_thresholds(blocks if name == "auto-halve-in-sample" else earlier)
        mus[name] = fig7.adapted_mu(thresholds, 4, 5, rule).tolist()
        assert (found[name]["mu_min"], found[name]["mu_max"]) == (min(mus[name]), max(mus[name]))
    assert len({tuple(mu) for mu in mus.values()}) == 3  # the rules differ, and so do the batches
    assert all(mu[0] < 1 and 1 / 4 not in mu for mu in mus.values())  # so that auto is neither post nor, below, pre
    for strategy, times in (("pre", [1 / 4] * 2), ("post", [1.0] * 2), *mus.items()):
        counts, values = dict.fromkeys(("lost", "nonzero", "full", "full_local"), 0), []
        for g, scale, factor in zip(blocks, scales, times, strict=True):
            payloads = [quantize(x, torch.tensor(scale) * factor, E4M3) for x in g]
            total = payloads[0]
            for q in payloads[1:]:
                total = quantize(total.float() + q.float(), 1.0, E4M3)
            counts["nonzero"] += int((g != 0).sum())
            counts["lost"] += sum(int(((x != 0) & (q.float() == 0)).sum()) for x, q in zip(g, payloads, strict=True))
            counts["full_local"] += sum(int((q.float().abs() == 448).sum()) for q in payloads)
            counts["full"] += int((total.float().abs() == 448).sum())
            values.append((total.float() / (scale * factor * 4)).flatten())
        mean, got = torch.cat([g.double().mean(0).flatten() for g in blocks]), torch.cat(values)
        row, elements = found[strategy], mean.numel()
        assert row["snr_db"] == pytest.approx(10 * math.log10(mean.square().sum() / (mean - got).square().sum()), abs=1e-4), strategy
        assert row["underflow"] == pytest.approx(float(((mean != 0) & (got == 0)).sum() / (mean != 0).sum())), strategy
        assert row["underflow_local"] == pytest.approx(counts["lost"] / counts["nonzero"]), strategy
        assert row["overflow"] == pytest.approx(counts["full"] / elements), strategy
        assert row["overflow_local"] == pytest.approx(counts["full_local"] / (4 * elements)), strategy
    assert found["pre"]["underflow"] > 0
    assert found["post"]["overflow"] > 0
