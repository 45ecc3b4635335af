"""What stands beside a replay: bytes counted again, averages handed over, kinds of steps kept apart."""

from typing import Any

import pytest
import torch

from helpers import replayed, tiny
from megatron.lm.build import build_training
from megatron.lm.graphs.replay import UPDATE, WARM_UP, Captured, Replays, alias
from megatron.lm.graphs.step_graph import StepGraphs
from megatron.lm.processes import process_groups
from megatron.lm.step import train_step
from msamp.kernels import ops
from msamp.nn import expert_matrices
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


@pytest.mark.parametrize(("level", "micro_batches"), [("O3", 3), ("O2", 2), ("O3", 1)])
def test_the_micro_batches_of_a_step_in_graphs_share_one_cast_of_the_experts(level, micro_batches, monkeypatch):
    """In graphs each of them cast the weights again, since a captured forward cannot see a weight's version."""
    settings = {"num_experts": 4, "moe_ffn_hidden_size": 24, "swiglu": True, "disable_bias_linear": True, "fp8_recipe": "tensorwise"}
    config = tiny.config("corpus", opt_level=level, num_layers=1, micro_batch_size=1, global_batch_size=micro_batches, **settings)
    calls, replaying, cast = [], [False], ops.expert_cast
    monkeypatch.setattr(expert_matrices.ops, "expert_cast", lambda *args: calls.append(1) or cast(*args))
    monkeypatch.setattr(expert_matrices, "_capturing", lambda _: replaying[0])

    def replay(graph: replayed.RunsAgain) -> None:
        replaying[0] = True
        graph.run()
        replaying[0] = False

    monkeypatch.setattr(replayed.RunsAgain, "replay", replay)

    def trained(in_graphs: bool) -> tuple[list[torch.Tensor], list[int]]:
        with tiny.started(config), replayed.on_a_cpu():
            process_groups.seed_all(config.training.seed)
            made, counts = build_training(config, tiny.VOCABULARY), []
            graphs, stream = StepGraphs(made, "step") if in_graphs else None, tiny.micro_batches(config)
            weights = [w for w in made.model.modules() if isinstance(w, expert_matrices.ExpertMatrices)]
            for number in range(WARM_UP + 3):
                for w in weights if number == WARM_UP + 2 else ():
                    w()  # as an evaluation between the steps, which is eager
                calls.clear()
                train_step(made, stream, graphs)
                counts.append(len(calls))
            assert len(weights) == 2
            assert all(w._step_cast is None and not w._shares for w in weights)
            assert all((w._cast is None) == in_graphs for w in weights), "an eager cast stays beside those of the graphs"
            return tiny.bits(made.model.parameters()), counts

    bits, counts = trained(in_graphs=True)
    assert counts == [2] * len(counts), "FC1 and FC2"
    eager, _ = trained(in_graphs=False)
    assert tiny.same(bits, eager)


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
