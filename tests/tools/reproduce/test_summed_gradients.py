"""Training on gradients that ranks sum in FP8: the sums against the mean, mu's rules, and a training run of each kind."""

import pytest
import torch

from helpers import tiny
from msamp.comm.exchange import NCCLWire
from msamp.numerics.formats import E4M3
from msamp.numerics.quantize import quantize
from tools.reproduce import fig7, sum_orders
from tools.reproduce.fp16_lstm import bytes_of
from tools.reproduce.gradients import LOOPS, shares, trained_gradients
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


# Where gradients lie in a format's range, by hand.


def test_shares_of_a_format_by_hand():
    values = torch.tensor([0.0, 2.0**-10, 2.0**-9, -(2.0**-7), 2.0**-6, 448.0, -449.0, 1.0])
    assert {name: round(share * 7 / 100) for name, share in shares(values, E4M3).items()} == {
        "lost": 1, "subnormal": 2, "normal": 3, "above": 1,
    }  # fmt: skip


def test_gradients_are_those_of_the_matrices():
    text = torch.arange(4000, dtype=torch.int64).remainder(97).to(torch.uint8)
    found = trained_gradients(LOOPS["toy"], text)
    assert [tuple(g.shape) for g in found] == [(96, 32), (32, 32), (128, 32), (32, 128)]
    assert all(bool((g != 0).any()) for g in found)


# The orders of an FP8 sum, by hand and against `NCCLWire`.


def payloads(*values):
    return quantize(torch.tensor([[value] for value in values]), 1.0, E4M3)


def test_a_chain_rounds_each_sum_and_a_tree_keeps_equals_together():
    ones = payloads(*[1.0] * 32)
    assert float(sum_orders.chain(ones, E4M3).float()) == 16.0  # 16 + 1 rounds back to 16: E4M3 has steps of 2 there
    assert float(sum_orders.tree(ones, E4M3).float()) == 32.0
    assert float(sum_orders.chains_then_tree(ones, E4M3).float()) == 32.0
    assert float(sum_orders.tree(payloads(3.0, 5.0, 7.0), E4M3).float()) == 15.0  # the last of an odd number waits


def test_the_chain_is_the_sum_of_the_exchange():
    gradients = torch.randn(16, 6, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = torch.tensor(16.0)
    plain, _ = fig7.exchange(NCCLWire(E4M3), gradients, scale)
    ordered, _ = fig7.exchange(sum_orders.OrderedWire(E4M3, sum_orders.CHAIN), gradients, scale)
    assert tiny.same(tiny.bits([plain.own]), tiny.bits([ordered.own]))
