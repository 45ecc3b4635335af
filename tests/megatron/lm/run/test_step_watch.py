"""What is looked at after every step: bad steps named and counted, spikes, signals and the clock, decided by all ranks alike."""

import itertools
import math
import multiprocessing
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist, tiny
from helpers.faulty import FIRST, NORM, Once, at, patched, rolling, saved, signalled, told, trained
from megatron.lm import pretrain, step
from megatron.lm.checkpoint.files.folder import iteration_folder, read_info
from megatron.lm.errors import RunStopped
from megatron.lm.model.gpt import mean_loss
from megatron.lm.processes.grid import Ranks
from megatron.lm.run.signals import Requests
from megatron.lm.run.start import with_checkpoint
from megatron.lm.training.run_record import health_problem

# What only one of two ranks meets


def spoiled_on_rank_1(prefix: str, runs: dict[str, dict[str, Any]], names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    spoil = at(2, names=names) if torch.distributed.get_rank() == 1 else at()
    with patched(spoil=spoil):
        return {name: told(trained(tiny.config(prefix, train_iters=3, **flags))[0], "skipped") for name, flags in runs.items()}


def one_rank_asks(prefix: str, folder: str) -> dict[str, Any]:
    """What two ranks do about what only rank 1 has met."""
    found: dict[str, Any] = {}
    for name, change, settings in (
        ("save", signalled(signal.SIGUSR1, 3, (1,)), tiny.config(prefix, train_iters=6, save=f"{folder}/save")),
        ("leave", signalled(signal.SIGTERM, 3, (1,)), tiny.config(prefix, train_iters=6, save=f"{folder}/leave")),
        ("roll back", Once(6, ranks=(1,)), rolling(prefix, f"{folder}/roll", precision="O3", train_iters=9)),
    ):
        with patched(change):
            rows, weights = trained(settings)
        found[name] = ([row["iteration"] for row in told(rows, "train")], weights)  # rank 0 writes the rows
    torch.distributed.barrier()
    found["saved"] = {name: saved(Path(folder, name)) for name in ("save", "leave")}
    return found


def seen_by_one(folder: str) -> str:
    own = Path(folder) / str(torch.distributed.get_rank())
    settings = tiny.config("corpus", load=str(own), save=str(own))
    try:
        return str(with_checkpoint(settings.checkpoint)[0].load is None)
    except ValueError as error:
        return str(error)


def two_ranks(prefix: str, folder: str) -> dict[str, Any]:
    runs = {level: {"precision": level} for level in ("bf16", "O3")}
    found = {
        "spoiled": spoiled_on_rank_1(prefix, runs, (FIRST, NORM)),
        "asked": one_rank_asks(prefix, folder),
        "empty": seen_by_one(folder),
    }
    if torch.distributed.get_rank() == 1:
        Path(folder, "1").mkdir()
        Path(folder, "1", "latest_checkpointed_iteration.txt").write_text("4")
    return found | {"one has it": seen_by_one(folder)}


@pytest.fixture(scope="module")
def pair(gloo_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return dist.run(two_ranks, 2, str(gloo_prefix), str(tmp_path_factory.mktemp("pair")), timeout=800)


# Steps that are not finite


@pytest.mark.parametrize("level", ["fp32", "O2", "O3"])
def test_a_skipped_step_names_rank_and_tensors_in_the_order_of_backward(prefix: Path, capsys: pytest.CaptureFixture[str], level: str):
    norm = "decoder.layers.0.self_attention.linear_proj.weight"
    with patched(spoil=at(3, names=(norm, FIRST))):
        rows = tiny.run(tiny.config(prefix, precision=level, train_iters=5))
    assert told(rows, "skipped") == [
        {"kind": "skipped", "iteration": 3, "tensors": {"0": [f"the gradient of {name}" for name in (FIRST, norm)]}}
    ]
    assert f"skipped iteration 3 (1 in a row, the run stops at 20); not finite: rank 0: the gradient of {FIRST}" in capsys.readouterr().out
    assert [row["skipped"] for row in told(rows, "train")] == [0, 0, 1, 1, 1]


def test_a_checkpoint_right_after_a_skipped_step_is_unhealthy(prefix: Path, tmp_path: Path):
    with patched(spoil=at(3, names=(FIRST,))):
        tiny.run(tiny.config(prefix, precision="O2", train_iters=3, save=str(tmp_path)))
    assert "iteration 3 was skipped" in (health_problem(read_info(iteration_folder(tmp_path, 3))) or "")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradients_are(prefix: Path, monkeypatch: pytest.MonkeyPatch, bad: float):
    calls = itertools.count(1)

    def spoiled(loss_sum: Tensor, loss_mask: Tensor, context: Ranks) -> tuple[Tensor, dict[str, Tensor]]:
        return mean_loss(loss_sum + (bad if next(calls) == 2 else 0.0), loss_mask, context)

    monkeypatch.setattr(step, "mean_loss", spoiled)
    rows, _ = trained(tiny.config(prefix, opt_level="O2", train_iters=4))
    (row,) = told(rows, "skipped")
    assert row["iteration"] == 2
    assert row["tensors"]["0"][0] == "the loss"
    assert [row["skipped"] for row in told(rows, "train")] == [0, 1, 1, 1]


def test_the_run_stops_after_so_many_in_a_row_and_saves_nothing(prefix: Path, tmp_path: Path):
    settings = tiny.config(prefix, opt_level="O2", max_skipped_steps=3, save=str(tmp_path), save_interval=4, train_iters=12)
    with patched(spoil=at(2, 3, 5, 6, 7)), pytest.raises(RunStopped) as stopped:
        tiny.run(settings)
    for part in ("3 steps in a row", "the last one at iteration 7", f"rank 0: the gradient of {FIRST}", "--lr", "--max-skipped-steps"):
        assert part in str(stopped.value)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    again = tiny.config(prefix, opt_level="O2", max_skipped_steps=3, train_iters=12)
    with patched(spoil=at(2, 3, 5, 6, 8, 9)):  # each row is ended by a good step
        assert len(told(tiny.run(again), "skipped")) == 6


def test_the_rank_whose_gradient_was_not_finite_is_named(pair: list[dict[str, Any]]):
    """Also where the gradient travels without a scale, and where another rank's average of it is what the optimizer sees."""
    for rank in pair:
        assert list(rank["spoiled"]) == ["bf16", "O3"]
        for rows in rank["spoiled"].values():
            assert [row["tensors"] for row in rows] == [{"1": [f"the gradient of {NORM}", f"the gradient of {FIRST}"]}]


# Spikes


# Signals and the clock


def test_the_clock_saves_and_leaves(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trained(tiny.config(prefix, train_iters=6, save=str(tmp_path), exit_duration_in_mins=1e-6))
    assert saved(tmp_path) == ["iter_0000002"]
    assert "leaving after iteration 2, saved: --exit-duration-in-mins 1e-06" in capsys.readouterr().out
    trained(tiny.config(prefix, train_iters=6, exit_duration_in_mins=1e-6))
    assert "leaving after iteration 2, nothing saved, since there is no --save" in capsys.readouterr().out


def test_a_run_whose_torchrun_is_gone_saves_and_fails(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of several torchruns those that stay have to start their processes again, which they do after a failure."""
    monkeypatch.setattr(Requests, "take", lambda self: [False, False, False, True])
    with pytest.raises(RunStopped, match=r"leaving after iteration \d, saved: torchrun, which started this, is gone"):
        trained(tiny.config(prefix, train_iters=6, save=str(tmp_path), exit_code_unfinished=75))
    assert len(saved(tmp_path)) == 1


FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--micro-batch-size 2 --train-iters 4 --lr 1e-3 --eval-iters 0 --split 80,15,5 --log-interval 1 --fp8-min-gain 0"
)


def waited_for(done: Callable[[], Any], seconds: float = 100.0) -> Any:
    """What `done` returns when it is first true."""
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return found


def asked_by_signals(flags: list[str], metrics: Path, marker: Path) -> int:
    """The trainer's exit code; signals as a batch system sends them: to the whole process group, the reader of the data included."""

    def ask() -> None:
        waited_for(lambda: metrics.is_file() and '"train"' in metrics.read_text())
        os.killpg(0, signal.SIGUSR1)
        waited_for(marker.is_file)
        os.killpg(0, signal.SIGTERM)

    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own; this one would start readers as it was started
    threading.Thread(target=ask, daemon=True).start()
    return pretrain.main(flags)


def test_a_process_saves_on_sigusr1_and_leaves_with_0_on_sigterm(prefix: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder, metrics = tmp_path / "save", tmp_path / "metrics.jsonl"
    marker = folder / "latest_checkpointed_iteration.txt"
    flags = [*FLAGS, "--data-path", str(prefix), "--train-iters", "100000", "--save", str(folder), "--metrics-file", str(metrics)]
    assert dist.run(asked_by_signals, 1, [*flags, "--num-workers", "1"], metrics, marker, init=False) == [0]
    last = int(marker.read_text())
    assert f"leaving after iteration {last}, saved: SIGTERM" in capfd.readouterr().out
    assert len(saved(folder)) == 2
    assert tiny.read(metrics)[-1]["iteration"] == last


# A run that resumes by itself, seen by two ranks


def test_ranks_that_see_different_folders_are_refused(pair: list[dict[str, Any]]):
    for rank in pair:
        assert rank["empty"] == "True"
        assert rank["one has it"].startswith("rank 1 sees a checkpoint in --load")
        assert "rank 0 does not: use a folder that all machines share" in rank["one has it"]
