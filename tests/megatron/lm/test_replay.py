"""What stands beside a replay: bytes counted again, averages handed over, kinds of steps kept apart."""

from typing import Any

import pytest
import replayed
import tiny
import torch

from megatron.lm.build import build_training
from megatron.lm.replay import UPDATE, WARM_UP, Captured, Inputs, Replays


@pytest.fixture
def graphs() -> Any:
    with tiny.started(config := tiny.config("corpus", precision="O3")), replayed.on_a_cpu():
        yield Replays(build_training(config, tiny.VOCABULARY), "step")


def test_bytes_and_averages_come_with_every_replay_but_the_first(graphs: Replays, monkeypatch):
    sync, handed_over = graphs.training.grad_sync, []
    monkeypatch.setattr(type(sync), "restore", lambda _, averages: handed_over.append(averages))
    graphs._record("exchange", lambda: None, finishes=True)
    (key,) = graphs._graphs
    graphs._graphs[key] = Captured(graphs._graphs[key].graph, {("weight", "all-to-all"): 12}, True, ["where they stand"])
    seen = []
    for _ in range(3):
        graphs._launch("exchange")
        seen.append((sync.sent.take(), len(handed_over)))
    assert seen == [({}, 0), ({("weight", "all-to-all"): 12}, 1), ({("weight", "all-to-all"): 12}, 2)]


def test_a_step_that_counts_or_is_recorded_has_graphs_of_its_own(graphs: Replays):
    statistics, ran = graphs.training.grad_sync.statistics, []
    for active in (False, True):
        statistics.watch(active)
        assert not graphs._known("backward")
        graphs._record("backward", lambda active=active: ran.append(active))
        graphs._record("backward", lambda: ran.append("again"))
    for active in (True, False):
        statistics.watch(active)
        graphs._launch("backward")
    assert ran == [True, False]
    assert graphs.captured == 2


def test_graphs_wait_for_the_window_and_for_the_first_updates(graphs: Replays):
    training = graphs.training
    assert not graphs.ready()
    for _ in range(tiny.WINDOW):
        training.scaling.roll(None)
    assert all(layer.delayed for layer in training.scaling.layers.values())
    assert [graphs.ready() for _ in range(WARM_UP + 2)] == [False] * (WARM_UP + 2)  # no weight has been updated
    graphs._record(UPDATE, lambda: None)
    assert graphs.ready()
    graphs.release()
    assert not graphs.captured
    assert not graphs.ready()


def test_inputs_stay_where_they_are():
    inputs, tokens = Inputs(), torch.arange(12).view(2, 6)
    inputs.fill({"tokens": tokens[:, ::2]})
    there = inputs.batch["tokens"]
    assert there.is_contiguous()
    inputs.fill({"tokens": tokens[:, 1::2]})
    assert inputs.batch["tokens"] is there
    assert torch.equal(there, tokens[:, 1::2])
