"""Whole runs: levels against each other, what must not change a trajectory, evaluation and saving on time."""

import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import dist, tiny
from megatron.lm.checkpoint import saving
from megatron.lm.errors import RunStopped
from megatron.lm.run import trainer
from msamp.comm import collectives

SLOW = functools.partial(pytest.param, marks=pytest.mark.nightly)
LEVELS = ("O3", *(SLOW(level) for level in ("fp32", "fp16-amp", "coat", "O1", "O2")))
LONG = {"train_iters": 30, "lr": 1e-2, "global_batch_size": 8, "micro_batch_size": 8}


def kinds(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["kind"], row.get("iteration", 0)) for row in rows if row["kind"] != "train"]


# Quality


@pytest.fixture(scope="module")
def level_rows(prefix: Path) -> dict[str, list[dict[str, Any]]]:
    """By level, each trained when first asked for."""

    class Rows(dict):
        def __missing__(self, level: str) -> list[dict[str, Any]]:
            self[level] = tiny.run(tiny.config(prefix, precision=level, eval_iters=4, **LONG))
            return self[level]

    return Rows()


def valid_loss(rows: list[dict[str, Any]]) -> float:
    return next(row["loss"] for row in rows if row["kind"] == "valid")


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_learns_skips_nothing_and_ends_near_bf16(level_rows: dict[str, list[dict[str, Any]]], level: str):
    rows, bf16 = level_rows[level], level_rows["bf16"]
    assert [tiny.losses(found)[0] for found in (rows, bf16)] == pytest.approx([math.log(64)] * 2, rel=0.02)
    assert valid_loss(bf16) < 3.1
    assert valid_loss(rows) == pytest.approx(valid_loss(bf16), rel=0.02)
    assert all(row["skipped"] == 0 for row in rows if row["kind"] == "train")


# What must not change a trajectory, bit for bit

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def reference(prefix: Path) -> list[float]:
    """Losses at O2, past the filling of the delayed window."""
    return tiny.losses(tiny.run(tiny.config(prefix, opt_level="O2", train_iters=tiny.BOTH_PHASES, **DROPOUT)))


EVALUATED = {"eval_iters": 2, "eval_interval": 5}
RECORDED = {"record_precision": "precision.jsonl", "record_interval": 4}
SAVED = {"save": "checkpoints", "save_interval": 5}
LOGGED = {"log_interval": 1, "peak_tflops": 1.0, "tensorboard_dir": "events", "metrics_file": "metrics.jsonl"}


@pytest.mark.parametrize(
    "settings",
    [EVALUATED | RECORDED | SAVED | LOGGED, *(SLOW(settings) for settings in ({}, EVALUATED, RECORDED, SAVED, LOGGED))],
    ids=lambda settings: "+".join(settings) or "again",
)
def test_the_same_losses(prefix: Path, tmp_path: Path, reference: list[float], settings: dict[str, Any]):
    settings = {k: str(tmp_path / v) if isinstance(v, str) else v for k, v in settings.items()}
    rows = tiny.run(tiny.config(prefix, opt_level="O2", train_iters=tiny.BOTH_PHASES, **DROPOUT, **settings))
    assert tiny.losses(rows) == reference


@pytest.mark.parametrize(
    ("level", "modules"),
    [
        ({"opt_level": "O2", **DROPOUT}, ["core_attn", "mlp"]),
        SLOW({"opt_level": "O2", **DROPOUT}, ["core_attn"]),
        *(SLOW({"opt_level": level}, modules) for level in ("O0", "O3") for modules in (["core_attn"], ["core_attn", "mlp"])),
    ],
    ids=str,
)
def test_selective_recomputation_gives_the_same_losses(prefix: Path, level: dict[str, Any], modules: list[str]):
    recompute = {"recompute_granularity": "selective", "recompute_modules": modules}
    losses = [tiny.losses(tiny.run(tiny.config(prefix, train_iters=4, **level, **extra))) for extra in ({}, recompute)]
    assert losses[0] == losses[1]


# When things happen


def test_evaluations_and_checkpoints_on_time(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = tiny.run(tiny.config(prefix, train_iters=10, eval_interval=4, eval_iters=1, save=str(tmp_path / "save"), save_interval=3))
    assert kinds(rows) == [("precision", 0), ("valid", 4), ("valid", 8), ("valid", 10), ("test", 10)]
    assert sorted(path.name for path in (tmp_path / "save").iterdir()) == [
        ".lock",
        "iter_0000003",
        "iter_0000006",
        "iter_0000009",
        "iter_0000010",
        "latest_checkpointed_iteration.txt",
    ]
    said = capsys.readouterr().out
    assert "  valid at iteration 4  loss " in said
    assert f"saved {tmp_path / 'save' / 'iter_0000009'}" in said


@pytest.mark.promise("Data", "A failed evaluation does not prevent its iteration's save.")
@pytest.mark.parametrize(("settings", "saved"), [({"eval_interval": 2, "save_interval": 2}, "2"), ({}, "3")])
def test_an_evaluation_that_fails_costs_no_save(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], saved: str
):
    def failing(*_: Any) -> float:
        raise RuntimeError("the disk of the validation data is gone")

    monkeypatch.setattr(trainer, "evaluate", failing)
    with pytest.raises(RuntimeError, match="validation data is gone"):
        tiny.run(tiny.config(prefix, train_iters=3, eval_iters=1, save=str(tmp_path), **settings))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == saved


def test_exit_interval_saves_and_leaves(prefix: Path, tmp_path: Path):
    rows = tiny.run(tiny.config(prefix, train_iters=10, exit_interval=4, eval_iters=1, save=str(tmp_path)))
    assert [row["iteration"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_bits_per_byte_from_the_counts_beside_the_data(prefix: Path):
    counts = json.loads(Path(f"{prefix}.json").read_text())
    rows = tiny.run(tiny.config(prefix, train_iters=1, eval_iters=1))
    row = next(row for row in rows if row["kind"] == "valid")
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) * counts["tokens"] / counts["text_bytes"])
    assert row["ppl"] == pytest.approx(math.exp(row["loss"]))


def test_batches_go_on_where_a_resume_starts(prefix: Path):
    """The stream of a resumed run is the rest of the first one's, so no sample is seen twice."""
    with tiny.trainer(tiny.config(prefix, train_iters=6)) as made:
        whole = [batch["tokens"] for batch in made.data.batches(made.training, made.data.train, 0)]
        rest = [batch["tokens"] for batch in made.data.batches(made.training, made.data.train, 8)]
    assert len(whole) >= 6
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], rest, strict=True))


# Determinism


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["bf16", "O2", "O3"])
def test_deterministic_runs_end_with_the_same_bits(prefix: Path, level: str):
    """At a size at which the embedding's and cuDNN's backward differ from run to run without the flag."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "micro_batch_size": 8, "global_batch_size": 8}
    found = []
    for _ in range(2):
        with tiny.trainer(tiny.config(prefix, precision=level, deterministic=True, train_iters=30, **shape)) as made:
            made.run()
            found.append(tiny.bits(made.training.model.parameters()))
    assert tiny.same(*found)


def dying_in_a_save(prefix: str, folder: str) -> None:
    """Rank 1 ends without a word where it would read back what it has written; what rank 0 says goes into a file."""

    def gone(files: object) -> None:
        os._exit(0)

    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch, tiny.trainer(tiny.config(prefix, train_iters=2, save=f"{folder}/save")) as made:
        patch.setattr(collectives, "ROLL_CALL_SECONDS", 0.5)
        if rank == 1:
            patch.setattr(saving, "digest_entries", gone)
        try:
            made.run()
        except RunStopped as error:
            Path(folder, "said").write_text(str(error))
            os._exit(0)


@pytest.mark.promise("Starting and ending", "A rank that dies during a save is named.")
def test_a_rank_that_dies_in_a_save_is_named(gloo_prefix: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="result_"):
        dist.run(dying_in_a_save, 2, str(gloo_prefix), str(tmp_path))
    said = (tmp_path / "said").read_text()
    assert said.startswith("saving at iteration 2, a connection to another rank failed: rank 1 does not answer (")
    assert "resume from the last checkpoint (" in said
