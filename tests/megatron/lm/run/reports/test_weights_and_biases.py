"""Curves in Weights & Biases: those of TensorBoard, from the last rank, with the iteration as x-axis. Offline; no account is needed."""

import importlib
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import dist, hosts, tiny
from megatron.lm import pretrain
from megatron.lm.config import Config
from megatron.lm.run.reports import weights_and_biases
from megatron.lm.run.reports.weights_and_biases import WandbRun
from megatron.lm.shell.logs import Unwritten

Points = list[tuple[int, dict[str, float]]]  # step of W&B, and the values


class FakeWandb(SimpleNamespace):
    """The part of the package that is used; `runs` has what each was started with, `points` what was logged."""

    class Error(Exception):
        pass

    def __init__(self, step: int = 0, fails: str | None = None) -> None:
        super().__init__(runs=[], points=[], metrics=[], ended=[], starts_at=step, fails=fails)

    def Settings(self, **options: Any) -> dict[str, Any]:
        return options

    def init(self, **how: Any) -> SimpleNamespace:
        if self.fails == "init":
            raise self.Error("No API key configured. Use `wandb login` to log in.")
        self.runs.append(how)
        return SimpleNamespace(
            step=self.starts_at,
            define_metric=lambda name, **options: self.metrics.append((name, options)),
            log=self.log,
            finish=lambda exit_code: self.ended.append(exit_code),
        )

    def log(self, values: dict[str, float], step: int) -> None:
        if self.fails == "log":
            raise self.Error("the service is gone")
        self.points.append((step, values))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_FINISH_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    return module


def flags(folder: Path) -> dict[str, Any]:
    return {"wandb_project": "p", "wandb_exp_name": "n", "wandb_save_dir": str(folder / "wb")}


def settings(folder: Path) -> Config:
    return tiny.config("corpus", **flags(folder))


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Curves of TensorBoard."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


def by_name(points: Points) -> dict[str, list[tuple[int, float]]]:
    """The same of W&B, in FP32 as TensorBoard has them."""
    found: dict[str, list[tuple[int, float]]] = {}
    for _, values in points:
        for name, value in values.items():
            if name != "iteration":
                found.setdefault(name, []).append((int(values["iteration"]), float(torch.tensor(value, dtype=torch.float32))))
    return found


def test_a_run_has_the_names_of_its_flags_and_the_iteration_as_axis(fake: FakeWandb, tmp_path: Path):
    run = WandbRun(settings(tmp_path), "abc", Unwritten())
    run.log({"train/loss": 2.0}, 5)
    run.close()
    (how,) = fake.runs
    assert (how["project"], how["name"], how["entity"], how["id"], how["resume"]) == ("p", "n", None, "abc", "allow")
    assert (how["dir"], how["config"]["hidden_size"]) == (str(tmp_path / "wb"), 32)
    assert how["settings"]["finish_timeout"] == weights_and_biases.FINISH_SECONDS
    json.dumps(how["config"])
    assert ("*", {"step_metric": "iteration"}) in fake.metrics
    assert fake.points == [(5, {"iteration": 5, "train/loss": 2.0})]
    assert fake.ended == [0]


def _resumed(prefix: Path, folder: Path) -> None:
    """Four iterations with evaluations and recorded precision, then two more from the checkpoint."""
    common: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4, "eval_interval": 2, "eval_iters": 1, "opt_level": "O2"}
    common |= {"save": str(folder / "save"), "load": str(folder / "save"), "save_interval": 2, "tensorboard_dir": str(folder / "events")}
    common |= {"record_precision": str(folder / "precision.jsonl"), "record_interval": 2, "lr_decay_iters": 6}
    for iterations in (4, 6):
        tiny.run(tiny.config(prefix, train_iters=iterations, **flags(folder), **common))


def test_a_resumed_run_continues_its_curves(fake: FakeWandb, prefix: Path, tmp_path: Path):
    _resumed(prefix, tmp_path)
    assert by_name(fake.points) == curves(tmp_path / "events")
    assert {"train/loss", "valid/loss", "test/loss", "precision/total/norm"} <= set(by_name(fake.points))
    assert [step for step, values in fake.points if "train/loss" in values] == [1, 2, 3, 4, 5, 6]
    first, second = fake.runs
    assert first["id"] == second["id"]
    info = json.loads(next((tmp_path / "save").glob("iter_0000004*/checkpoint.json")).read_text())
    assert first["id"] == info["run"]["id"]
    assert fake.ended == [0, 0]


def _two_ranks(prefix: Path, folder: Path) -> tuple[list[dict[str, Any]], Points]:
    module = FakeWandb()
    sys.modules["wandb"] = module  # type: ignore[assignment]
    common: dict[str, Any] = {"record_precision": str(folder / "p.jsonl"), "record_interval": 2, "opt_level": "O2"}
    common |= {"tensorboard_dir": str(folder / "events"), "eval_iters": 1, "save": str(folder / "save")}
    tiny.run(tiny.config(prefix, train_iters=2, micro_batch_size=2, **flags(folder), **common))
    return module.runs, module.points


def test_the_last_rank_logs_what_rank_0_writes_to_tensorboard(gloo_prefix: Path, tmp_path: Path):
    (runs, points), (last_runs, last_points) = dist.run(_two_ranks, 2, gloo_prefix, tmp_path)
    assert (runs, points) == ([], [])
    (run,) = last_runs
    info = json.loads(next((tmp_path / "save").glob("iter_0000002*/checkpoint.json")).read_text())
    assert run["id"] == info["run"]["id"]
    ours, theirs = by_name(last_points), curves(tmp_path / "events")
    assert ours.keys() == theirs.keys()
    own = {name for name in ours if name.endswith(("_ms", "_per_s", "tflops", "_mib"))}
    assert {name: ours[name] for name in ours.keys() - own} == {name: theirs[name] for name in theirs.keys() - own}


def records(file: Path) -> Iterator[Any]:
    """Records of a `.wandb` file: LevelDB's log format in blocks of 32 KiB, after a header of 7 bytes."""
    pb = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield pb.Record.FromString(record)
            record = b""


def test_the_real_package_keeps_a_run_offline(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hosts.need("wandb", "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _resumed(prefix, tmp_path)
    points, names = [], set()
    for file in sorted((tmp_path / "wb" / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime):
        for record in records(file):
            if record.WhichOneof("record_type") == "run":
                names.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.WhichOneof("record_type") == "history":
                values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                step = values.pop("_step", record.history.step.num)
                points.append((step, {key: value for key, value in values.items() if not key.startswith("_")}))
    assert by_name(points) == curves(tmp_path / "events")
    assert [step for step, values in points if "train/loss" in values] == [1, 2, 3, 4, 5, 6]
    ((_, project, name),) = names
    assert (project, name) == ("p", "n")


@pytest.mark.usefixtures("alone")
def test_the_command_with_the_real_package_offline_and_without_a_key(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    wandb = hosts.need("wandb", "wandb")
    line = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 4 --train-iters 2 --lr 1e-3"
    line += f" --tokenizer-type NullTokenizer --vocab-size 60 --data-path {prefix} --split 80,15,5 --eval-iters 1 --lr-warmup-iters 1"
    line += f" --wandb-project p --wandb-exp-name n --wandb-save-dir {tmp_path}/wb"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert pretrain.main(line.split()) == 0
    assert len(list(tmp_path.glob("wb/wandb/offline-run-*/run-*.wandb"))) == 1
    wandb.teardown()  # forgets the environment
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    capsys.readouterr()
    assert pretrain.main(line.split()) == 2
    assert "--wandb-project p: Weights & Biases cannot start (" in capsys.readouterr().err
