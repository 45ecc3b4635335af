"""Bytes at rest by kind, as the formats say."""

import pytest
import torch
from torch import nn

import msamp
from megatron.lm.post.memory import Stored, peak, reset_peak, size, stored

BYTES = {  # of a linear weight in BF16: weight, gradient as backward leaves it, master, both moments
    "O0": (2, 2, 4, 8),
    "O1": (2, 1, 0, 8),
    "O2": (2, 1, 0, 3),
    "O3": (1, 1, 2, 3),
}


@pytest.mark.parametrize("level", BYTES)
def test_a_level_takes_the_bytes_of_its_formats(level):
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), level)
    for _ in range(2):
        model(torch.randn(16, 64, dtype=torch.bfloat16)).square().mean().backward()
        found = stored(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    n = 64 * 64
    assert found.parameters == n
    each = [round(x / n, 2) for x in (found.weights, found.gradients, found.masters, found.moments)]
    assert each == list(BYTES[level])
    assert found.states == found.masters + found.moments
    assert stored(model, optimizer).gradients == 0


def test_a_shared_parameter_counts_once():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    assert stored(nn.Sequential(first, second)) == Stored(weights=256, parameters=64)


def test_kinds_add_up():
    assert Stored(1, 2, 3, 4, 5) + Stored(10, 20, 30, 40, 50) == Stored(11, 22, 33, 44, 55)


def test_nothing_is_no_byte_and_a_cpu_has_no_peak():
    assert size(None) == 0
    reset_peak([torch.device("cpu")])
    assert peak(torch.device("cpu")) is None
