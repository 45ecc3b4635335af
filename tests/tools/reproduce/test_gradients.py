"""Where gradients lie in a format's range, by hand."""

from pathlib import Path

import torch

from msamp.numerics.formats import E4M3
from tools.reproduce import gradients
from tools.reproduce.entry import Task
from tools.reproduce.gradients import LOOPS, shares, trained_gradients


def test_shares_of_a_format_by_hand():
    values = torch.tensor([0.0, 2.0**-10, 2.0**-9, -(2.0**-7), 2.0**-6, 448.0, -449.0, 1.0])
    assert {name: round(share * 7 / 100) for name, share in shares(values, E4M3).items()} == {
        "lost": 1, "subnormal": 2, "normal": 3, "above": 1,
    }  # fmt: skip


def test_real_sums_say_the_least_share_and_the_means(monkeypatch):
    def rows(ranks, collective, strategy, **more):
        told = {"model": "gpt", "ranks": ranks, "collective": collective, "format": "fp8-e4m3", "strategy": strategy, "seed": "1234"}
        told |= {"chain": "1.0", "tree": "1.0", "some_chain": "1.0", "snr_db": "20", "underflow_local": "0.01", "overflow": "0"}
        return [told | {"snr_db": snr} | more for snr in ("20", "30")]

    strategies = list(gradients.PAPER)
    four = [row for name in strategies for row in rows("4", "reduce-scatter", name, **({"chain": "0.9"} if name == "post" else {}))]
    monkeypatch.setattr(gradients, "read", lambda file: [row for name in strategies for row in rows("2", "all-reduce", name)] + four)
    found = {finding.quantity: finding.ours for finding in gradients.real_sums(Task("kept", "whole", Path("text"), Path("folder")))}
    two, rest = "gpt, 2 ranks, all-reduce, fp8-e4m3: ", "gpt, 4 ranks, reduce-scatter, fp8-e4m3: "
    assert found[two + "elements equal to the simulated chain, least"] == 100
    assert (found[two + "pre, SNR"], found[two + "pre, underflow, sent"]) == (25, 1)
    assert found[rest + "elements equal to the simulated chain, least"] == 90
    assert found[rest + "fp32-sum, elements equal to the simulated sum, least"] == 100
    assert not [name for name in found if name.startswith(two) and "tree" in name]
    assert not [name for name in found if name.startswith(rest) and "SNR" in name]


def test_gradients_are_those_of_the_matrices():
    text = torch.arange(4000, dtype=torch.int64).remainder(97).to(torch.uint8)
    found = trained_gradients(LOOPS["toy"], text)
    assert [tuple(g.shape) for g in found] == [(96, 32), (32, 32), (128, 32), (32, 128)]
    assert all(bool((g != 0).any()) for g in found)
