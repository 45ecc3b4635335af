"""Where gradients lie in a format's range, by hand."""

import torch

from msamp.numerics.formats import E4M3
from tools.reproduce.gradients import LOOPS, shares, trained_gradients


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
