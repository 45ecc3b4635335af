"""Training on gradients that ranks sum in FP8: the sums against the mean, mu's rules, and a training run of each kind."""

import pytest
import torch

from tools.reproduce.fp16_lstm import bytes_of
from tools.reproduce.summed_gradients import STRATEGIES, UNQUANTIZED, Summing, train
from tools.reproduce.trainings import Loop

LOOP = Loop(width=32, layers=1, length=8, batch=4, steps=6, warm_up=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_are_near_the_mean_of_the_ranks(strategy):
    torch.manual_seed(0)
    gradients = [torch.randn(4, 16, 32) * 10.0**scale for scale in (-6, 0)]
    summing = Summing(strategy, 2, 4)
    for _ in range(12):  # mu falls until few enough elements saturate
        means = summing.mean(gradients)
    for g, mean in zip(gradients, means, strict=True):
        error = float((mean - g.mean(0)).norm() / g.mean(0).norm())
        assert error < (0.5 if strategy == "post" else 0.15)
        assert mean.shape == (16, 32)


def test_mu_falls_by_its_rule_and_other_strategies_have_none():
    gradients = [torch.ones(8, 16, 16)]  # the sum of eight full payloads saturates everywhere
    mus = {}
    for strategy in STRATEGIES:
        summing = Summing(strategy, 1, 8)
        for _ in range(3):
            summing.mean(gradients)
        mus[strategy] = float(summing.mu)
    assert mus == {"fp32-sum": 1.0, "pre": 1.0, "post": 1.0, "auto-halve": 0.125, "auto-paper": 0.5}


def test_a_run_is_the_same_for_the_same_seed_and_differs_by_the_sum(tmp_path):
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    text = bytes_of(tmp_path / "text")
    exact, again, low = (list(train(name, LOOP, text, 1, every=3)) for name in (UNQUANTIZED, UNQUANTIZED, "pre"))
    assert exact == again
    assert [step for step, _ in exact] == [3, 6, 6]
    assert low[-1] != exact[-1]
    assert low[-1][1] == pytest.approx(exact[-1][1], rel=0.02)
