"""What a run says: log line, metrics file, TensorBoard, and the arithmetic behind them."""

import contextlib
import json
import math
import os
import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from helpers import dist, tiny
from megatron.lm.config import Config
from megatron.lm.config.presets import flops_per_token
from megatron.lm.errors import RunStopped
from megatron.lm.run import trainer
from megatron.lm.run.reports import log_line, metrics
from megatron.lm.run.reports.log_line import WIDTH, wrapped
from megatron.lm.run.reports.metrics import Metrics
from megatron.lm.training.state import StepResult, Training
from msamp.numerics.formats import FP32
from msamp.parallel.data_parallel import grad_sync

# The fields that tools read by name.
TRAIN_KEYS = {"kind", "iteration", "tokens", "loss", "lr", "grad_norm", "skipped", "tokens_per_s", "tflops", "memory_gib"} | {
    "memory_gib_min",
    "sent_weight_mib",
    "sent_activation_mib",
}
EVALUATION_KEYS = {"kind", "iteration", "tokens", "loss", "ppl", "bits_per_byte"}


class Clock:
    """Stands for the clock of `metrics`: time passes only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: self.now)

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def result(loss_sum: float, tokens: float, skipped: bool = False, eager: bool | None = None) -> StepResult:
    return StepResult(
        loss_sum=torch.tensor(loss_sum),
        tokens=torch.tensor(tokens),
        grad_norm=torch.tensor(1.5, dtype=torch.float64),
        lr=2e-4,
        skipped=skipped,
        eager=eager,
    )


def new(config: Config, iteration: int = 0, skipped: int = 0) -> Metrics:
    """Metrics of a run that stands at `iteration`."""
    layer = nn.Linear(2, 2)
    sync = grad_sync(layer, dict.fromkeys(layer.parameters(), FP32))
    training = SimpleNamespace(iteration=iteration, optimizer=SimpleNamespace(skipped_steps=skipped), grad_sync=sync)
    sizes = {"iterations": config.iterations(1), "seq_length": 16, "flops_per_token": flops_per_token(config.model, 64)}
    made = Metrics(config.logging, cast("Training", training), config.batch_sizes(1), **sizes)
    made.open()
    return made


def collect(made: Metrics) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    made.write = rows.append  # type: ignore[method-assign]
    return rows


def test_the_arithmetic_of_an_interval(one_process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    clock = Clock(monkeypatch)
    config = tiny.config("corpus", log_interval=2, train_iters=10, global_batch_size=8, peak_tflops=1e-6)
    made = new(config)
    rows = collect(made)
    clock.pass_(1.0)
    made.record(result(300.0, 100.0), 1)
    assert rows == []
    made.grad_sync.sent.add("weight", "all-to-all", 4 * 2**20)
    made.grad_sync.sent.add("weight", "all-gather", 2 * 2**20)
    made.grad_sync.sent.add("activation", "all-reduce", 2**20)
    clock.pass_(3.0)
    made.record(result(500.0, 100.0, skipped=True), 2)
    (row,) = rows
    tokens_per_s = 8 * 16 / 2.0
    flops = flops_per_token(config.model, 64)
    assert row["loss"] == pytest.approx(4.0)  # of all counted tokens of the interval
    assert row["tokens"] == 2 * 8 * 16
    assert row["skipped"] == 1
    assert row["step_ms"] == pytest.approx(2000)
    assert row["tokens_per_s"] == pytest.approx(tokens_per_s)
    assert row["tflops"] == pytest.approx(tokens_per_s * flops / 1e12)
    assert row["mfu_given_peak"] == pytest.approx(tokens_per_s * flops / 1e12 / 1e-6)
    assert row["memory_gib_min"] == row["memory_gib"] > 0  # the least and the most of one process
    assert (row["sent_weight_mib"], row["sent_activation_mib"]) == (3.0, 0.5)  # a step
    assert row["sent_bytes"] == {"weight all-to-all": 2**21, "weight all-gather": 2**20, "activation all-reduce": 2**19}
    assert not {"grad_saturation", "mu_min"} & set(row)  # no gradient is scaled
    line = capsys.readouterr().out
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  iter  2/10  loss 4\.0000  lr 2\.0e-04  norm 1\.5  skipped 1  2000 ms  64 tok/s  MFU \d+%"
        r"  \d+\.\d GiB  ETA 0:00:16\n",
        line,
    ), line


def test_a_resumed_run_counts_skipped_steps_on_tells_its_own_time_and_reports_its_last_iteration(
    one_process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = Clock(monkeypatch)
    made = new(tiny.config("corpus", log_interval=2, train_iters=9), iteration=5, skipped=3)
    made.grad_sync.autoscale = SimpleNamespace(mu=torch.tensor([0.5, 2.0]))  # type: ignore[assignment]
    rows = collect(made)
    clock.pass_(4.0)
    made.record(result(1.0, 1.0, skipped=True, eager=True), 6)
    clock.pass_(4.0)
    made.record(result(1.0, 1.0, eager=False), 7)
    clock.pass_(10.0)
    made.paused += 6.0  # an evaluation
    made.record(result(1.0, 1.0, eager=False), 8)
    clock.pass_(4.0)
    made.record(result(1.0, 1.0), 9)
    assert [(row["iteration"], row["skipped"]) for row in rows] == [(6, 4), (8, 4), (9, 4)]
    assert [row["step_ms"] for row in rows[:2]] == pytest.approx([4000, 4000])
    assert [row["eager_steps"] for row in rows[:2]] == [1, 0]
    assert (rows[0]["mu_min"], rows[0]["mu_max"]) == (0.5, 2.0)
    assert re.findall(r"ETA (\S+)", capsys.readouterr().out)[0] == "0:00:12"  # three steps of the four that this start has
    made.evaluation("valid", 9, math.log(2), None)
    assert rows[-1]["ppl"] == pytest.approx(2)


def least_and_most_of_two() -> tuple[float, float]:
    return metrics.least_and_most(1.0 + torch.distributed.get_rank())


def test_memory_is_the_least_and_the_most_of_the_ranks():
    assert dist.run(least_and_most_of_two, 2) == [(1.0, 2.0)] * 2


def test_rows_of_the_metrics_file(prefix: Path, tmp_path: Path):
    file = tmp_path / "new" / "folder" / "metrics.jsonl"
    settings = {"opt_level": "O2", "train_iters": 4, "eval_iters": 1, "eval_interval": 2, "log_interval": 2}
    rows = tiny.run(tiny.config(prefix, metrics_file=str(file), **settings))
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    assert {kind: len(found) for kind, found in by_kind.items()} == {
        "precision": 1,
        "train": 2,
        "valid": 2,
        "test": 1,
    }
    assert all(set(row) >= TRAIN_KEYS for row in by_kind["train"])
    assert all(set(row) == EVALUATION_KEYS for row in by_kind["valid"] + by_kind["test"])
    (start,) = by_kind["precision"]
    process = {"recipe": "O2", "start": 0, "iterations": 4, "pid": os.getpid(), "host": socket.gethostname()}
    assert start.items() >= process.items()
    model = {"kind", "bytes_per_parameter", "parameters", "linears", "state_gib_min", "state_gib_max"}
    assert set(start) == model | process.keys() | {"started"}
    for row in by_kind["train"]:
        assert row["sent_bytes"] == {}  # there is no one to send to
        assert row["grad_saturation"] == row["grad_saturation_reduced"] < 1e-3
        assert row["grad_underflow"] >= row["grad_underflow_reduced"]
        assert 0 < row["grad_underflow"] < 0.05
        assert "mu_min" not in row
    for row in by_kind["train"]:
        for key in TRAIN_KEYS - {"kind"}:
            assert isinstance(row[key], int | float), key
            assert math.isfinite(row[key]), key
    assert [row["tokens"] for row in by_kind["train"]] == [2 * 4 * 16, 4 * 4 * 16]
    again = tiny.run(tiny.config(prefix, metrics_file=str(file), **settings))
    assert len(again) == 2 * len(rows)  # a resumed run goes on in the same file
    assert again[: len(rows)] == rows


@pytest.mark.promise("Starting and ending", "The metrics file says how a start ended; without that entry the process was killed.")
def test_the_last_row_says_how_the_start_ended(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, settings = tmp_path / "m.jsonl", {"train_iters": 2, "save": str(tmp_path / "save"), "load": str(tmp_path / "save")}

    def ended(**more: Any) -> tuple[dict[str, Any], ...]:
        with contextlib.suppress(RunStopped, KeyboardInterrupt):
            tiny.run(tiny.config(prefix, metrics_file=str(file), **settings, **more))
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return next(row for row in reversed(rows) if row["kind"] == "precision"), rows[-1]

    _, last = ended(exit_interval=1)
    assert last == {"kind": "end", "iteration": 1, "status": "stopped", "why": "--exit-interval 1"}
    start, last = ended()
    assert (start["start"], start["iterations"]) == (1, 2)
    assert last == {"kind": "end", "iteration": 2, "status": "completed", "why": None}

    def stop(self: trainer.Trainer) -> None:
        raise RunStopped("no space\nin two lines")

    monkeypatch.setattr(trainer.Trainer, "_train", stop)
    _, last = ended()
    assert last == {"kind": "end", "iteration": 2, "status": "failed", "why": "no space"}
    monkeypatch.setattr(trainer.Trainer, "_train", lambda self: os.kill(os.getpid(), signal.SIGINT))
    _, last = ended()
    assert last == {"kind": "end", "iteration": 2, "status": "stopped", "why": "interrupted by SIGINT"}


def test_a_metrics_file_is_strict_json_even_where_a_step_was_not_finite(one_process: None, tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    made = new(tiny.config("corpus", metrics_file=str(file)))
    bad = StepResult(
        loss_sum=torch.tensor(math.nan),
        tokens=torch.tensor(1.0),
        grad_norm=torch.tensor(math.inf, dtype=torch.float64),
        lr=1e-3,
        skipped=True,
    )
    made.record(bad, 1)
    made.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (row,) = [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]
    assert row["skipped"] == 1


def test_tensorboard_can_be_read(prefix: Path, tmp_path: Path):
    folder = tmp_path / "events"
    rows = tiny.run(tiny.config(prefix, opt_level="O2", train_iters=4, eval_iters=1, tensorboard_dir=str(folder)))
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"train/{key}" for key in TRAIN_KEYS - {"kind", "iteration"}} <= tags
    assert {"valid/loss", "valid/ppl", "test/loss"} <= tags
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 3, 4]
    assert [event.value for event in losses] == pytest.approx(tiny.losses(rows), rel=1e-6)


def test_a_line_fits_its_width_and_fields_of_rank_0_stay():
    lines = wrapped("word " * 60 + "/p" * 100).splitlines()
    assert all(len(line) <= WIDTH for line in lines[:-1])
    assert lines[-1] == "    " + "/p" * 100


def test_a_line_of_megatron_lm_has_what_its_parsers_read():
    row = {"kind": "valid", "iteration": 2, "step_ms": 1.5, "tflops": 2, "lr": 1e-3, "loss": 5, "ppl": 148.4, "grad_norm": 0.5}
    line, evaluation = log_line.megatron_line(row, 3, 16, 8, 0), log_line.evaluation_line(row, megatron=True)
    assert re.search(
        r"iteration +2/ +3 \| consumed samples: +16 \| elapsed time per iteration \(ms\): 1\.5 \| .*lm loss: 5\.0+E\+00 ", line
    )
    assert re.search(r"validation loss at iteration 2 \| lm loss value: 5\.0+E\+00 \| lm loss PPL: 1\.484", evaluation)
