"""The orders of an FP8 sum, by hand and against `NCCLWire`."""

import pytest
import torch

from helpers import tiny
from msamp.comm.exchange import NCCLWire
from msamp.numerics.formats import E4M3
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import quantize
from tools.reproduce import fig7, sum_orders


def added(*values):
    total = torch.tensor([values[0]])
    for value in values[1:]:
        total = quantize(total.float() + torch.tensor([value]), 1.0, E4M3)
    return float(total.float())


def payloads(*values):
    return quantize(torch.tensor([[value] for value in values]), 1.0, E4M3)


def test_a_chain_rounds_each_sum_and_a_tree_keeps_equals_together():
    ones = payloads(*[1.0] * 32)
    assert float(sum_orders.chain(ones, E4M3).float()) == 16.0  # 16 + 1 rounds back to 16: E4M3 has steps of 2 there
    assert float(sum_orders.tree(ones, E4M3).float()) == 32.0
    assert float(sum_orders.chains_then_tree(ones, E4M3).float()) == 32.0


def test_a_tree_of_an_odd_number_lets_the_last_wait():
    values = (3.0, 5.0, 7.0)
    assert float(sum_orders.tree(payloads(*values), E4M3).float()) == added(added(3.0, 5.0), 7.0)
    assert float(sum_orders.tree(payloads(3.0), E4M3).float()) == 3.0


def test_every_order_saturates():
    for order in sum_orders.ORDERS.values():
        assert float(order(payloads(*[300.0] * 4), E4M3).float()) == E4M3.max


def test_the_chain_is_the_sum_of_the_exchange():
    gradients = torch.randn(16, 6, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = torch.tensor(16.0)
    plain, _ = fig7.exchange(NCCLWire(E4M3), gradients, scale)
    ordered, _ = fig7.exchange(sum_orders.OrderedWire(E4M3, sum_orders.CHAIN), gradients, scale)
    assert tiny.same(tiny.bits([plain.own]), tiny.bits([ordered.own]))


def test_at_many_ranks_the_order_decides_the_snr():
    """128 ranks of noise with a common part: a tree keeps more than 10 dB more than a chain, with the same payloads."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(1, 32, 32, generator=generator)
    gradients = common + torch.randn(128, 32, 32, generator=generator)
    mean = gradients.double().mean(0).flatten()
    snr = {}
    for order in sum_orders.ORDERS:
        reduced, _ = fig7.exchange(sum_orders.OrderedWire(E4M3, order), gradients, torch.tensor(0.5))
        snr[order] = sqnr_db(mean, reduced.own.float() * reduced.scale_inv)
    assert snr[sum_orders.TREE] > snr[sum_orders.CHAIN] + 10
    assert snr[sum_orders.NODES] > snr[sum_orders.CHAIN] + 10


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order 'ring' is unknown: choose one of chain, chains-of-8-then-tree, tree"):
        sum_orders.OrderedWire(E4M3, "ring")
