"""What stands beside a replay: bytes counted again, averages handed over, kinds of steps kept apart."""

from typing import Any

import pytest
import torch

from helpers import replayed, tiny
from megatron.lm.build import build_training
from megatron.lm.graphs.replay import UPDATE, Captured, Replays, alias
from msamp.numerics.formats import E4M3
from msamp.numerics.tensor import ScalingTensor


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


def test_python_sees_the_gradients_of_the_graph_that_ran_last_for_as_long_as_it_asks(graphs: Replays):
    """Not those of the graph that was captured last; and before the update is captured, those that the capture has left."""
    statistics, holder = graphs.training.grad_sync.statistics, graphs.training.grad_sync.params[0]
    for active in (False, True):
        statistics.watch(active)
        graphs._record("finish", lambda: None, finishes=True)
        graphs._record("other", lambda: None)
        key = graphs._key("finish")
        graphs._graphs[key] = graphs._graphs[key]._replace(borrowed=((holder, "main_grad", f"of a step with active {active}"),))
    holder.main_grad = "the last capture's"  # type: ignore[attr-defined]
    seen = []
    for active, captured in ((False, False), (False, True), (True, True)):
        statistics.watch(active)
        if captured:
            graphs._record(UPDATE, lambda: None)
        with graphs.gradients_in_sight():
            seen.append(holder.main_grad)  # type: ignore[attr-defined]
        assert holder.main_grad == "the last capture's"  # type: ignore[attr-defined]
    assert seen == ["the last capture's", "of a step with active False", "of a step with active True"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_an_alias_is_the_same_memory_and_does_not_keep_it(dtype):
    flat = torch.randn(6, 8, device="cuda").to(dtype)
    for x in (flat, flat[2:4], flat.t(), flat[0, 3]):
        other = alias(x)
        assert (other.data_ptr(), other.shape, other.stride(), other.dtype) == (x.data_ptr(), x.shape, x.stride(), x.dtype)
        assert other.float().equal(x.float())
    scaled = ScalingTensor.quantize(torch.randn(16, 16, device="cuda"), E4M3)
    assert alias(scaled).dequantize().equal(scaled.dequantize())
    held, x = torch.cuda.memory_allocated(), torch.ones(2**20, device="cuda")
    other = alias(x)
    x.fill_(2)
    assert float(other[-1]) == 2
    del x
    assert torch.cuda.memory_allocated() == held
