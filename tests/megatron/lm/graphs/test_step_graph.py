"""CUDA graphs: what stands in their way, and that replayed steps are eager steps bit for bit."""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import replayed, tiny
from megatron.lm.build import build_training
from megatron.lm.graphs.replay import UPDATE, WARM_UP
from megatron.lm.graphs.step_graph import FIRST, LAST, StepGraphs, build, choose, obstacle
from megatron.lm.processes import process_groups
from megatron.lm.run.reports.recorder import Recorder
from megatron.lm.step import evaluate, train_step
from megatron.lm.training.fp8_guard import check_guard, guarded
from megatron.lm.training.state import Training

EXPERTS = {"num_experts": 4, "swiglu": True, "disable_bias_linear": True}
OBSTACLES = {
    "tensor": ({"tensor_model_parallel_size": 2}, "without --sequence-parallel"),
    "dropout": ({"hidden_dropout": 0.1}, "dropout"),
    "recompute": ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, "recomputation"),
    "selective": ({"recompute_granularity": "selective", "precision": "bf16"}, "recomputation"),
    "experts": (EXPERTS | {"recompute_granularity": "selective", "precision": "O2"}, "recomputation"),
    "FP32 experts": (EXPERTS | {"precision": "fp32"}, "sizes that the host reads"),
    "narrow experts": (EXPERTS | {"precision": "bf16", "moe_ffn_hidden_size": 12}, "sizes that the host reads"),
    "owner": ({"grad_accum_on": "owner", "precision": "O2", "pipeline_model_parallel_size": 2, "num_layers": 4}, "in every micro-batch"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_captured_says_why(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    settings, reason = OBSTACLES[name]
    assert reason in (obstacle(*tiny.parts(tiny.config("corpus", **settings))) or "")
    stages = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_layers": 4}
    for free in ({"recompute_granularity": "selective"}, {"record_precision": "p.jsonl"}, stages):
        assert obstacle(*tiny.parts(tiny.config("corpus", precision="O3", **free))) is None


def test_without_a_gpu_or_buffers_that_nccl_can_register_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert obstacle(*tiny.parts(tiny.config("corpus"))) == "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("megatron.lm.graphs.step_graph.unregistrable", lambda: "of NCCL")
    assert choose(*tiny.parts(tiny.config("corpus"))) == ("none", "of NCCL")


def trained(mode: str, settings: dict[str, Any], bad: int | None = None, unseen: int | None = None) -> tuple[list[Any], list[Tensor], int]:
    """(losses, norms, rates, bytes sent) of 24 steps with an evaluation among them, the bits they end with, and the graphs captured.

    Micro-batch `bad` has an infinite loss; a run that never sees number `unseen` has a step less.
    """
    config = tiny.config("corpus", train_iters=30, cuda_graph=mode, **settings)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made = build_training(config, tiny.VOCABULARY)
        graphs, seen = build(made), []
        stream = (batch for number, batch in enumerate(tiny.micro_batches(config, bad)) if number != unseen)
        for step in range(24 - (unseen is not None)):
            made.grad_sync.statistics.watch(step % 5 == 4)
            result = train_step(made, stream, graphs)
            if step in (10, 20):
                seen.append(evaluate(made, tiny.micro_batches(config, None), 2))
            made.grad_sync.sent.take()
            counts = made.grad_sync.statistics.counts.tolist() if made.grad_sync.statistics.active else None
            scale = None if result.loss_scale is None else result.loss_scale.values().item()
            seen.append((result.loss_sum.item(), result.grad_norm.item(), result.lr, bool(result.skipped), counts, scale))
        tensors = [t for t in made.model.state_dict().values() if isinstance(t, Tensor)]
        tensors += [t for state in made.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return seen, tiny.bits(tensors), 0 if graphs is None else graphs.captured


def as_eager(mode: str, settings: dict[str, Any], bad: int | None = None) -> list[Any]:
    """What a run in graphs gives: the rows of an eager run, and the bits it ends with."""
    eager, bits, _ = trained("none", settings, bad)
    again, same_bits, captured = trained(mode, settings, bad)
    assert captured
    for number, (got, want) in enumerate(zip(again, eager, strict=True)):
        assert repr(got) == repr(want), f"row {number}"
    assert tiny.same(bits, same_bits)
    return again


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["bf16", "coat", "O1", "O2", "O3"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("mode", ["micro-batch", "step"])
def test_graphs_change_no_bit(level, micro_batches, mode):
    settings = {"precision": level, "micro_batch_size": 2, "global_batch_size": 2 * micro_batches}
    as_eager(mode, settings)


SUMS = {name: {"grad_accum_dtype": name} for name in ("fp8", "fp8-sr", "fp32")} | {"owner": {"grad_accum_on": "owner"}}


@pytest.mark.parametrize("sums", SUMS)
def test_replayed_micro_batches_add_up_as_eager_ones(sums):
    """Without a GPU: FP8 sums draw other random words in every replay, those of an eager step, and an owner's sums end with each graph."""

    def run(graphed: bool) -> list[Tensor]:
        settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 30, "fp8_recipe": "tensorwise", **SUMS[sums]}
        config = tiny.config("corpus", precision="O3", **settings)
        with tiny.started(config), replayed.on_a_cpu() as captures:
            process_groups.seed_all(config.training.seed)
            made, stream = build_training(config, tiny.VOCABULARY), tiny.micro_batches(config)
            graphs = StepGraphs(made, "step") if graphed else None
            for _ in range(WARM_UP + 4):
                train_step(made, stream, graphs)
            assert bool(captures) == graphed
            states = [t for state in made.optimizer.state.values() for t in state.values()]
            return tiny.bits([*made.model.parameters(), *states])

    assert tiny.same(run(False), run(True))


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "coat"])
@pytest.mark.parametrize("mode", ["none", "micro-batch", "step"])
def test_a_step_skipped_in_a_graph_leaves_no_trace(level, mode):
    settings = {"precision": level, "micro_batch_size": 2, "global_batch_size": 2}
    _, struck, _ = trained(mode, settings, bad=15)
    _, clean, _ = trained("none", settings, unseen=15)
    assert tiny.same(struck, clean)


@pytest.mark.parametrize("bad", [1, 12])  # an eager step, in which the window is filled, and a replayed one
def test_a_step_skipped_beside_replays_leaves_no_trace(bad):
    """Without a GPU: what the graphs would hold, and what the host counts beside them."""

    def run(struck: bool) -> tuple[list[Tensor], int]:
        config = tiny.config("corpus", precision="O2", micro_batch_size=2, global_batch_size=2, train_iters=30)
        with tiny.started(config), replayed.on_a_cpu() as captures:
            process_groups.seed_all(config.training.seed)
            made = build_training(config, tiny.VOCABULARY)
            graphs = StepGraphs(made, "step")
            stream = (batch for number, batch in enumerate(tiny.micro_batches(config, bad)) if struck or number != bad)
            for _ in range(15 + struck):
                train_step(made, stream, graphs)
            assert made.optimizer.skipped_steps == struck
            layers = made.scaling.layers.values()
            assert all(layer.delayed and layer.seen == 15 for layer in layers)
            assert captures
            states = [t for state in made.optimizer.state.values() for t in state.values()]
            return tiny.bits([*made.model.parameters(), *made.model.buffers(), *states]), len(captures)

    assert tiny.same(run(True)[0], run(False)[0])


def recorded(mode: str, settings: dict[str, Any], file: str | None) -> tuple[list[Tensor], list[Any]]:
    """The bits that 24 steps end with, and the recorder's lines."""
    config = tiny.config("corpus", train_iters=30, cuda_graph=mode, **settings)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made, lines = build_training(config, tiny.VOCABULARY), []
        graphs = build(made)
        recorder = None if file is None else Recorder(made, file, 6, lambda *_: None)
        stream = tiny.micro_batches(config, None)
        for iteration in range(1, 25):
            made.grad_sync.statistics.watch(iteration % 5 == 4)
            due = recorder is not None and recorder.due(iteration)
            with recorder.step(iteration) if due else contextlib.nullcontext():
                train_step(made, stream, graphs, recorder)
        if recorder is not None:
            recorder.close()
            lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        if graphs is not None:
            assert graphs.captured
            graphs.release()
        states = [t for state in made.optimizer.state.values() for t in state.values()]
        return tiny.bits([*made.model.parameters(), *made.model.buffers(), *states]), lines


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradients_of_the_last_eager_step_are_gone_before_a_capture_begins(micro_batches):
    """What is freed within a capture stays in the allocator and out of the graph's pool: 7B at O0 ran out of memory there."""
    config = tiny.config("corpus", micro_batch_size=1, global_batch_size=micro_batches, train_iters=30)
    with tiny.started(config), replayed.on_a_cpu() as captures:
        process_groups.seed_all(config.training.seed)
        made, stream, held = build_training(config, tiny.VOCABULARY), tiny.micro_batches(config, None), []

        def gradients() -> int:
            return sum(average is not None for *_, average in made.grad_sync.averages())

        captures.before = lambda: held.append(gradients())
        graphs = StepGraphs(made, "step")
        train_step(made, stream, None)
        assert gradients() > 0
        graphs.forward_backward(stream)
        assert held[0] == 0
        assert len(captures) == micro_batches


@pytest.mark.parametrize("mode", ["step", pytest.param("micro-batch", marks=pytest.mark.nightly)])
def test_after_a_recorded_step_the_graph_of_the_others_is_replayed_and_not_captured_again(mode, tmp_path: Path):
    shared = {"num_layers": 1, "fp8_recipe": "tensorwise"}  # which needs no window
    config = tiny.config("corpus", precision="O3", micro_batch_size=2, global_batch_size=4, train_iters=30, **shared)
    with tiny.started(config), replayed.on_a_cpu() as captures:
        process_groups.seed_all(config.training.seed)
        made, captured_at = build_training(config, tiny.VOCABULARY), []
        graphs = StepGraphs(made, mode)
        recorder = Recorder(made, str(tmp_path / "p.jsonl"), 3, lambda *_: None)
        stream = tiny.micro_batches(config, None)
        for iteration in range(1, 14):
            due = recorder.due(iteration)
            before = len(captures)
            with recorder.step(iteration) if due else contextlib.nullcontext():
                train_step(made, stream, graphs, recorder)
            captured_at += [(iteration, due)] * (len(captures) > before)
        recorder.close()
        replays = {key: done.graph.replays for key, done in graphs._graphs.items()}
    (plain, was_due), (recorded_at, is_due) = sorted(captured_at, key=lambda found: found[1])
    assert (was_due, is_due) == (False, True)
    assert recorded_at % 3 == 0
    places = {FIRST, LAST} | ({UPDATE} if mode == "step" else set())
    recorded_steps = len(range(recorded_at, 14, 3))
    assert recorded_steps > 1
    others = 14 - min(plain, recorded_at) - recorded_steps
    assert replays == {(p, on, on, False): recorded_steps if on else others for p in places for on in (False, True)}
    assert len(captures) == len(replays)


def test_a_step_that_the_guard_measures_has_its_own_graph():
    config = tiny.config("corpus", precision="O3", fp8_recipe="tensorwise", num_layers=1, fp8_guard=True, fp8_guard_interval=4)
    with tiny.started(config), replayed.on_a_cpu():
        made = build_training(config, tiny.VOCABULARY)
        graphs, stream = StepGraphs(made, "step"), tiny.micro_batches(config)
        for iteration in range(1, 10):
            with guarded(made, iteration):
                assert train_step(made, stream, graphs).eager == (iteration <= WARM_UP)
            assert check_guard(made, iteration) == []
        assert {key[3]: done.graph.replays for key, done in graphs._graphs.items()} == {False: 9 - WARM_UP - 2, True: 2}


def test_after_a_raise_the_trainer_captures_again_and_replays_no_graph_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every layer is raised in the first check, and a graph of before would go on in FP8."""
    every = 8  # past the first capture
    settings = {"precision": "O3", "fp8_recipe": "tensorwise", "num_layers": 1, "train_iters": 2 * every, "fp8_guard": True}
    settings |= {"fp8_guard_interval": every, "fp8_guard_raise_after": 1, "fp8_guard_sqnr": 100.0}
    run = tiny.config(tiny.write_data(tmp_path), **settings)
    eager = tiny.losses(tiny.run(run))
    built: list[int] = []  # how many graphs there were by then
    with replayed.on_a_cpu() as captures:

        def again(training: Training) -> StepGraphs:
            built.append(len(captures))
            return StepGraphs(training, "step")

        monkeypatch.setattr("megatron.lm.graphs.step_graph.build", again)
        rows = tiny.run(run)
    assert tiny.losses(rows) == eager
    assert {row["raised"] for row in rows if row["kind"] == "fp8_guard"} == {True}
    first, second = built
    assert first == 0 < second < len(captures)
    assert all(done.graph.run is replayed.gone for done in captures[:second])
    assert sum(done.graph.replays for done in captures[:second]) > 0 < sum(done.graph.replays for done in captures[second:])


@pytest.mark.gpu
@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_graphs_of_raised_layers_and_of_weights_that_somebody_writes_change_no_bit(raised, written):
    """A capture next to such writes failed once."""

    def run(mode: str) -> tuple[list[Tensor], int]:
        config = tiny.config("corpus", precision="O3", train_iters=40, cuda_graph=mode, fp8_guard=True, fp8_guard_interval=4)
        with tiny.started(config):
            process_groups.seed_all(config.training.seed)
            made = build_training(config, tiny.VOCABULARY)
            graphs, stream = build(made), tiny.micro_batches(config)
            for layer in list(made.guard.layers.values())[1::2]:
                layer.scaling.raised = raised
            for iteration in range(1, 31):
                if written:
                    with torch.no_grad():
                        next(iter(made.guard.layers.values())).weight.mul_(1.25)
                with guarded(made, iteration):
                    train_step(made, stream, graphs)
                made.guard.disarm()
            captured = 0 if graphs is None else graphs.captured
            if graphs is not None:
                graphs.release()
            states = [t for state in made.optimizer.state.values() for t in state.values()]
            return tiny.bits([*made.model.parameters(), *made.model.buffers(), *states]), captured

    bits, captured = run("step")
    assert captured
    assert tiny.same(run("none")[0], bits)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["bf16", "O2", "O3"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("mode", ["micro-batch", "step"])
def test_a_recorded_step_has_its_own_graph_and_changes_no_bit(level, micro_batches, mode, tmp_path: Path):
    settings = {"precision": level, "micro_batch_size": 2, "global_batch_size": 2 * micro_batches}
    plain, _ = recorded(mode, settings, None)
    again, lines = recorded(mode, settings, str(tmp_path / "graph.jsonl"))
    assert tiny.same(plain, again)
    eager, eager_lines = recorded("none", settings, str(tmp_path / "eager.jsonl"))
    assert tiny.same(plain, eager)
    assert [line["iteration"] for line in lines] == [1, 6, 12, 18, 24]
    for line, other in zip(lines, eager_lines, strict=True):
        assert line == other, line["iteration"]


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("mode", ["micro-batch", "step"])
def test_the_loss_scale_moves_in_graphs_as_it_does_without(mode, micro_batches):
    settings = {"precision": "fp16-amp", "initial_loss_scale": 2.0**18, "loss_scale_window": 2, "hysteresis": 1}
    settings |= {"micro_batch_size": 2, "global_batch_size": 2 * micro_batches}
    scales = [row[-1] for row in as_eager(mode, settings)[-10:] if isinstance(row, tuple)]
    assert any(a < b for a, b in itertools.pairwise(scales))
    assert any(a > b for a, b in itertools.pairwise(scales))
