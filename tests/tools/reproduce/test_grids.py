"""Memory and volume from shapes, against counts by hand."""

from pathlib import Path

import pytest

from tools.reproduce import grids
from tools.reproduce.entry import Task

TASK = Task("toy", "whole", Path("text"), Path("folder"))


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


def test_the_largest_model_fits_and_one_step_more_does_not():
    layers = grids.largest("O3", 32)
    room = grids.CARD - grids.memory.RESERVED / grids.GIB
    held = [grids.fullest(grids.configuration("175b", "O3", f"--num-layers {n}"), 32) for n in (layers, layers + 4)]
    assert held[0] <= room < held[1]
