"""Curves in Weights & Biases: those of TensorBoard, from the last rank, with the iteration as x-axis. Offline; no account is needed."""

import importlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import hosts, tiny
from megatron.lm import pretrain
from megatron.lm.run.reports.weights_and_biases import WandbRun, logs_here
from megatron.lm.shell.logs import Unwritten

Points = list[tuple[int, dict[str, float]]]  # step of W&B, and the values


def flags(folder: Path) -> dict[str, Any]:
    return {"wandb_project": "p", "wandb_exp_name": "n", "wandb_save_dir": str(folder / "wb")}


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


def _resumed(prefix: Path, folder: Path) -> None:
    """Four iterations with evaluations and recorded precision, then two more from the checkpoint."""
    common: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4, "eval_interval": 2, "eval_iters": 1, "opt_level": "O2"}
    common |= {"save": str(folder / "save"), "load": str(folder / "save"), "save_interval": 2, "tensorboard_dir": str(folder / "events")}
    common |= {"record_precision": str(folder / "precision.jsonl"), "record_interval": 2, "lr_decay_iters": 6}
    for iterations in (4, 6):
        tiny.run(tiny.config(prefix, train_iters=iterations, **flags(folder), **common))


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


def test_points_of_undone_iterations_come_later_and_a_failed_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = hosts.need("wandb", "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logging = tiny.config("corpus", **flags(tmp_path)).logging
    run = WandbRun(logging, str(tmp_path / "wb"), {}, "failing", Unwritten())
    for iteration in (1, 2, 1, 2, 3):  # a rollback
        run.log({"x": 1.0}, iteration)
    run.close(failed=True)
    wandb.teardown()  # writes the rest
    (file,) = (tmp_path / "wb" / "wandb").glob("offline-run-*/*.wandb")
    found = {kind: [record for record in records(file) if record.WhichOneof("record_type") == kind] for kind in ("history", "exit")}
    assert [record.history.step.num for record in found["history"]] == [1, 2, 3, 4, 5]
    assert [record.exit.exit_code for record in found["exit"]] == [1]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert not logs_here(logging)


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
