"""Which scales one amax holds down: by definition, over ranks, and in the precision record."""

import json
from pathlib import Path

import pytest
import torch

from helpers import dist, tiny
from megatron.lm.build import build_training
from megatron.lm.processes import process_groups
from megatron.lm.run.reports.amax_outliers import FACTOR, bits_held_down, outliers
from megatron.lm.run.reports.recorder import Recorder
from megatron.lm.step import train_step
from msamp.nn.scaling_state import LinearScaling, ScalingState
from msamp.numerics import recipe
from msamp.numerics.formats import E4M3
from msamp.numerics.scaling import Delayed, scale_from_amax

NAMES = {0: "input", 1: "grad_output"}


def scales(inputs: list[float], rule: Delayed | None = None) -> LinearScaling:
    """A layer whose inputs had these amaxes; those of `grad_output` were all 1."""
    layer = LinearScaling(recipe.O2.with_scaling(rule or Delayed(8)).gemm)
    state = ScalingState(layer)
    for amax in inputs:
        layer.amax.copy_(torch.tensor([amax, 1.0]))
        state.roll()
    return layer


@pytest.mark.parametrize(
    ("amaxes", "bits"),
    {
        "one outlier": ([1.0] * 7 + [1e8], 26),
        "it is an outlier above this": ([1.0] * 7 + [2 * FACTOR], 7),
        "and none up to this": ([1.0] * 7 + [FACTOR], 0),
        "two of them": ([1.0] * 4 + [1e8, 1.0, 1e6, 1.0], 26),
        "it has left the window": ([1e8] + [1.0] * 8, 0),
        "the window is not filled": ([1.0, 1e8, 1.0], 26),
        "there is no other": ([1e8], 0),
        "zeros are no amaxes": ([0.0] * 5 + [1.0, 1.0, 1e8], 26),
        "all alike": ([3.0] * 8, 0),
        "none at all": ([0.0] * 8, 0),
        "small ones are none": ([1.0] * 7 + [1e-8], 0),
    }.values(),
)
def test_by_how_many_bits_an_outlier_holds_a_scale_down(amaxes, bits):
    found = bits_held_down(scales(amaxes))
    assert found.tolist() == [bits, 0]
    assert found.dtype is torch.float64


def test_the_bits_are_those_that_the_scale_lacks():
    layer = scales([3.0] * 7 + [1e8])
    assert layer.scale[0] * 2.0 ** bits_held_down(layer)[0] == scale_from_amax(torch.tensor(3.0), E4M3.max)


def test_a_rule_that_looks_at_the_last_amax_alone_is_held_down_by_that():
    rule = Delayed(8, "most_recent")
    assert bits_held_down(scales([1.0] * 7 + [1e8], rule)).tolist() == [26, 0]
    assert bits_held_down(scales([1.0] * 6 + [1e8, 1.0], rule)).tolist() == [0, 0]


def _of_both_ranks() -> dict[str, dict[str, int]]:
    rank = torch.distributed.get_rank()
    named = [
        ("shared", scales([1.0] * 7 + [1e8]), NAMES),
        (f"own {rank}", scales([1.0] * 7 + [1e4 * (1 + rank)]), NAMES),
        ("quiet", scales([1.0] * 8), NAMES),
    ]
    return outliers(named, {name: bits_held_down(layer).tolist() for name, layer, _ in named})


def test_the_first_rank_has_those_of_all():
    first, second = dist.run(_of_both_ranks, 2)
    assert first == {"shared": {"input": 26}, "own 0": {"input": 13}, "own 1": {"input": 14}}
    assert second == {}


NAME = "decoder.layers.1.mlp.linear_fc1"


def test_a_scale_that_one_amax_holds_down_is_flagged(tmp_path: Path):
    config = tiny.config("corpus", precision="O2", train_iters=9, fp8_amax_history_len=4)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made, stream = build_training(config, tiny.VOCABULARY), tiny.micro_batches(config)
        recorder = Recorder(made, str(tmp_path / "p.jsonl"), 1, lambda *_: None)
        layer = made.model.decoder.layers[1].mlp.linear_fc1
        for step in range(1, 9):
            if step == 3:
                layer.scaling.amax[0] = 1e8  # as by one value of the step's inputs
            with recorder.step(step):
                train_step(made, stream, recorder=recorder)
        recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [row["outliers"] for row in lines]
    assert [bool(row) for row in found] == [False, False, True, True, True, True, False, False]
    assert all(row.keys() == {NAME} and row[NAME].keys() == {"input"} and 20 < row[NAME]["input"] < 30 for row in found[2:6])
