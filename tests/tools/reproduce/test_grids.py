"""Memory and volume from shapes, against counts by hand."""

from pathlib import Path

import pytest

from tools.reproduce import grids
from tools.reproduce.entry import Task

TASK = Task("toy", "whole", Path("text"), Path("folder"))
LARGEST = ["table5", "175b", "O3", "4"]  # of the planner's rows


def by_quantity(run):
    return {finding.quantity: finding.ours for finding in run(TASK)}


def test_the_volume_of_weights_by_hand():
    config = grids.configuration("7b", "O0")
    parameters = 32 * (12 * 4096**2 + 13 * 4096) + 2 * 4096 + 50304 * 4096
    assert grids.weight_volume(config, 32) == pytest.approx(parameters * 6 * 31 / 32 / 2**30)
    linear = 32 * 12 * 4096**2
    low = 2 * linear + 4 * 50304 * 4096 + 8 * (32 * 13 * 4096 + 2 * 4096)
    assert grids.weight_volume(grids.configuration("7b", "O3"), 32) == pytest.approx(low * 31 / 32 / 2**30)


def test_fp8_saves_a_half_where_the_paper_has_a_third_and_175b_fits_at_4096():
    found = by_quantity(grids.table5)
    assert 40 < found["7b, memory saved by FP8"] < 50
    assert all(60 < found[f"{model}, weight-related volume saved by FP8"] < 70 for model in grids.GRIDS)
    held = {level: grids.fullest(grids.configuration("175b", level, "--seq-length 4096"), 32) for level in ("O0", "O3")}
    assert held["O3"] < grids.CARD - grids.memory.RESERVED / grids.GIB < held["O0"]


def test_mfu_and_rate_of_a_planned_grid_by_hand():
    one = grids.planner.planned5("7b", 32, 2, "O3")
    mfu, rate = grids._shares5(one, 32)
    linear = 6 * (32 * 12 * 4096**2 + 50304 * 4096)  # FLOPs per token; attention adds a causal half of 12 x layers x width x length
    flops = (linear + 6 * 32 * 4096 * 2048) * 2048 * 2048  # a batch of 2,048 sequences
    assert mfu == pytest.approx(100 * flops / one.step.total / 32 / 1979e12, rel=0.01)
    assert rate == pytest.approx(100 * one.step.seconds["data-parallel, exposed"] / sum(one.step.seconds.values()))


def test_the_largest_model_fits_and_one_step_more_does_not():
    layers = grids.largest("O3", 32)
    room = grids.CARD - grids.memory.RESERVED / grids.GIB
    held = [grids.fullest(grids.configuration("175b", "O3", f"--num-layers {n}"), 32) for n in (layers, layers + 4)]
    assert held[0] <= room < held[1]


def test_memory_of_ranks_stands_beside_their_state():
    def row(case, zero, least, most, gpus=2, commit="abc1234"):
        told = {
            "preset": "1.3b",
            "gpus": gpus,
            "case": case,
            "zero": zero,
            "rest_gib_min": least,
            "rest_gib_max": most,
            "commit": commit,
            "gpu": "H",
        }
        return {name: str(value) for name, value in told.items()}

    rows = [row("O3", "on", 1, 9, commit="old1234"), row("O3", "on", 5.0, 5.25), row("O1", "off", 7, 8), row("megatron bf16", "", "", 9)]
    found = {finding.quantity: finding for finding in grids.at_rest(rows)}
    assert found["1.3b, DP 2, O3: memory of a rank at rest"].ours == 5.25
    assert found["1.3b, DP 2, O3: spread at rest"].ours == 0.25
    assert found["1.3b, DP 2, O3: spread at rest"].where["commit"] == "abc1234"
    linear, embedding, small = 24 * 12 * 2048**2, 50304 * 2048, (24 * 13 + 2) * 2048
    state = linear * (1 + 6 / 2) + embedding * (2 + 7 / 2) + small * (2 + 16 / 2)
    assert found["1.3b, DP 2, greedy-cut from shapes: state of a rank"].ours == pytest.approx(state / 2**30, rel=1e-3)
    assert len(found) == 4
