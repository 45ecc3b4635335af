"""ZeRO in graphs: the first graph of a step gathers the weights of the update before, and nothing reads them earlier."""

import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from helpers import dist, replayed, tiny
from helpers.late_weights import late
from megatron.lm import checkpoint
from megatron.lm.build import build_training
from megatron.lm.graphs.replay import WARM_UP
from megatron.lm.graphs.step_graph import StepGraphs
from megatron.lm.processes import process_groups
from megatron.lm.run.reports.norms import ParametersNorm
from megatron.lm.run.step_watch import check_replicas
from megatron.lm.step import evaluate, train_step
from megatron.lm.training.state import Training
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.masters import version_of
from msamp.parallel.greedy_zero import ZeRO

STEPS = WARM_UP + 7
SMALL = {"num_layers": 1, "micro_batch_size": 1, "fp8_recipe": "tensorwise", "ddp_bucket_size": 2000, "train_iters": 40}
CASES: dict[str, dict[str, Any]] = {
    "O3": {"precision": "O3", "global_batch_size": 2},
    "O3, two micro-batches, untied": {"precision": "O3", "global_batch_size": 4, "untie_embeddings_and_output_weights": True},
}


class Arrived:
    """Between the graphs of a step: all weights have arrived in the first, and the optimizer does not take them for written from outside,
    after which it would read all masters again."""

    def __init__(self, made: Training) -> None:
        self.optimizer = made.optimizer

    def before_update(self) -> None:
        shard = self.optimizer.shard
        assert isinstance(shard, ZeRO)
        assert not shard._pending
        assert not shard.deferred
        assert all(self.optimizer._cast[one.weight] == version_of(one.param) for one in self.optimizer.holdings())


def bits(made: Training) -> list[Tensor]:
    """The bits of weights with their scales, and of this rank's states."""
    made.optimizer.wait()
    weights = [t for p in made.model.parameters() for t in ((p.payload, p.scale_inv) if isinstance(p, ScalingTensor) else (p,))]
    return tiny.bits([*weights, *made.model.buffers(), *(t for state in made.optimizer.state.values() for t in state.values())])


def trained(name: str, kind: Any, folder: str | None = None, bad: int | None = None, **settings: Any) -> dict[str, Any]:
    """STEPS steps with an evaluation, a save, a comparison and a norm of the weights among them, in graphs of a `kind` or eager."""
    config = tiny.config("corpus", **SMALL | CASES[name] | settings)
    with tiny.started(config):
        process_groups.seed_all(config.training.seed)
        made, seen = build_training(config, tiny.VOCABULARY), []
        graphs, stream, held = None if kind is None else kind(made, "step"), tiny.micro_batches(config, bad), []
        for step in range(STEPS):
            made.grad_sync.statistics.watch(step % 3 == 2)
            result = train_step(made, stream, graphs, Arrived(made) if step >= WARM_UP else None)
            held.append(made.optimizer.shard.deferred)
            sent, skipped = made.grad_sync.sent.take(), bool(result.skipped)
            if skipped:
                sent.pop(("weight", "all-gather"), None)  # on a CPU an eager step sees that there is nothing to gather
            seen.append((repr(float(result.loss_sum)), repr(float(result.grad_norm)), skipped, sent))
            if step == WARM_UP + 1:
                seen.append(evaluate(made, tiny.micro_batches(config), 1))
            if step == WARM_UP + 3 and folder is not None:
                checkpoint.save(made, Path(folder))
            if step == WARM_UP + 4:
                check_replicas(made, step)
            if step == WARM_UP + 5:
                seen.append(ParametersNorm(made).values())
            seen.append(made.grad_sync.sent.take())
        for _ in range(2):  # the graphs are gone
            seen.append(float(train_step(made, stream).loss_sum))
        return {"seen": seen, "bits": bits(made), "deferred": held}


def compared(names: list[str], folder: str) -> dict[str, Any]:
    """For each case: whether graphs that defer, and those that do not, have the rows and bits of eager steps."""
    outcome = {}
    for name in names:
        bad = WARM_UP + 6 if name == "O3" else None
        eager = trained(name, None, f"{folder}/eager/{name}", bad)
        with replayed.on_a_cpu(), late():
            deferring = trained(name, StepGraphs, f"{folder}/graphs/{name}", bad)
            whole = trained(name, StepGraphs, None, bad, overlap_param_gather=False) if name == "O3" else eager  # one case shows it
        outcome[name] = {
            "rows": [(a, b, c) for a, b, c in zip(eager["seen"], deferring["seen"], whole["seen"], strict=True) if not a == b == c],
            "bits": (tiny.same(eager["bits"], deferring["bits"]), tiny.same(eager["bits"], whole["bits"])),
            "deferred": (any(eager["deferred"]), deferring["deferred"], any(whole["deferred"])),
            "skipped": sum(row[2] for row in eager["seen"] if isinstance(row, tuple)),
        }
    return outcome


def check(ranks: list[Any], names: list[str]) -> None:
    for outcome in ranks:
        for name in names:
            got = outcome[name]
            assert got["rows"] == [], name
            assert got["bits"] == (True, True), name
            assert got["deferred"] == (False, [step >= WARM_UP for step in range(STEPS)], False), name
            assert got["skipped"] == (name == "O3"), name


def same_checkpoint(folder: str, name: str) -> bool:
    """Whether two checkpoints continue with the same bits."""
    found = []
    for kind in ("eager", "graphs"):
        config = tiny.config("corpus", **SMALL | CASES[name], load=f"{folder}/{kind}/{name}")
        with tiny.started(config):
            made = build_training(config, tiny.VOCABULARY)
            checkpoint.load(made)
            found.append(bits(made))
    return tiny.same(*found)


def in_every_mode(folder: str) -> tuple[Any, bool]:
    return compared(list(CASES), folder), same_checkpoint(folder, "O3")


def test_weights_that_the_next_step_gathers_change_no_bit_and_no_byte_sent(tmp_path: Path):
    ranks = dist.run(in_every_mode, 2, str(tmp_path))
    check([outcome for outcome, _ in ranks], list(CASES))
    assert all(same for _, same in ranks)


def run(prefix: str, kind: str, **settings: Any) -> tuple[list[Any], list[Any], list[Tensor], int]:
    """A run of the trainer: its rows without times, its lines of casts, the bits it ends with, and how often it built graphs."""
    files = {"save": f"{prefix}.{kind}", "record_precision": f"{prefix}.{kind}.casts", "metrics_file": f"{prefix}.{kind}.jsonl"}
    config, built = tiny.config(prefix, **SMALL | files | settings), []

    def build(training: Training) -> StepGraphs | None:
        built.append(training.iteration)
        return None if kind == "eager" else StepGraphs(training, "step")

    with patch("megatron.lm.graphs.step_graph.build", build), tiny.trainer(config) as made:
        made.run()
        assert not made.training.optimizer.shard.deferred
        weights = bits(made.training)
    if torch.distributed.get_rank() > 0:
        return [], [], weights, len(built)
    measured = ("train_loss", "grad_norm", "params_norm", "loss", "skipped", "raised", "kind")
    rows = [{key: row[key] for key in measured if key in row} for row in tiny.read(Path(files["metrics_file"]))]
    return rows, Path(files["record_precision"]).read_text().splitlines(), weights, len(built)


def whole_runs(prefix: str) -> list[Any]:
    """A run that stops and its continuation, eager and in graphs: with evaluations, saves, recorded steps, comparisons of the copies, and
    a guard that raises layers."""
    settings = {"precision": "O3", "global_batch_size": 2, "train_iters": 22, "log_params_norm": True}
    settings |= {"eval_interval": 6, "eval_iters": 1, "save_interval": 7, "record_interval": 5, "exit_interval": 14}
    settings |= {"fp8_guard": True, "fp8_guard_interval": 8, "fp8_guard_raise_after": 1, "fp8_guard_sqnr": 100.0}
    settings |= {"check_weight_hash_across_dp_replicas_interval": 6}
    found = []
    for kind in ("eager", "graphs"):
        with replayed.on_a_cpu(), late() if kind == "graphs" else contextlib.nullcontext():
            first = run(prefix, kind, **settings)
            found.append((first, run(prefix, kind, **settings | {"exit_interval": None, "load": f"{prefix}.{kind}"})))
    with replayed.on_a_cpu(), late():  # nothing reads the last step's weights in the run itself
        run(prefix, "unsaved", precision="O3", global_batch_size=2, train_iters=WARM_UP + 2, save=None)
    return found


@pytest.mark.nightly(15)  # each by itself: above
def test_a_run_with_all_that_reads_weights_between_steps_changes_no_bit(tmp_path: Path):
    ranks = dist.run(whole_runs, 2, str(tiny.write_data(tmp_path)))
    for eager, graphs in ranks:
        for (rows, lines, weights, _), (same_rows, same_lines, same_weights, _) in zip(eager, graphs, strict=True):
            assert rows == same_rows
            assert lines == same_lines
            assert tiny.same(weights, same_weights)
        assert [built for *_, built in graphs] == [2, 1]  # the guard raises layers in the first run
    rows, lines, *_ = ranks[0][0][1]
    assert {"valid", "test"} <= {row["kind"] for row in rows}
    assert any("params_norm" in row for row in rows)
    assert len(lines) > 2
