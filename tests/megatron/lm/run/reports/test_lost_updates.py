"""The trainer's warning of updates that its masters lose: one line for a run, when a layer has lost more than half for 100 steps."""

import re
from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny
from helpers.faulty import told
from megatron.lm.run.reports import lost_updates
from megatron.lm.step import train_step

FC1 = "decoder.layers.1.mlp.linear_fc1"
NEAREST = {"master_rounding": "nearest"}
LOW = {"lr": 1e-7, "min_lr": 1e-7, "lr_decay_style": "constant", "lr_warmup_iters": 0}


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check at each second step, and four steps for the 100."""
    monkeypatch.setattr(lost_updates, "EVERY", 2)
    monkeypatch.setattr(lost_updates, "STEPS", 4)


def warnings_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("updates are lost")]


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"opt_level": "O2", **NEAREST}, "--master-rounding stochastic"),
        ({"precision": "bf16-a"}, "use --precision collage-plus, which keeps 2^-17 of a weight, or one with FP32 masters"),
        ({"precision": "collage-light"}, None),
        ({"opt_level": "O2", "master_rounding": "stochastic"}, None),
    ],
    ids=lambda value: "-".join(str(x) for x in value.values()) if isinstance(value, dict) else "",
)
def test_a_low_learning_rate_is_warned_of_once_where_the_masters_lose_it(prefix: Path, capsys, settings: dict[str, Any], fix: str | None):
    rows = told(tiny.run(tiny.config(prefix, train_iters=8, **(LOW | settings))), "lost_updates")
    lines = warnings_of(capsys.readouterr().out)
    if fix is None:
        assert (lines, rows) == ([], [])
        return
    (line,), (row,) = lines, rows
    assert "at iteration 6: for 4 iterations" in line
    assert "learning rate 1e-07" in line
    assert fix in line
    assert row["iteration"] == 6
    assert row["lr"] == 1e-7
    assert {f"decoder.layers.{i}.{name}" for i in range(2) for name in ("mlp.linear_fc1", "self_attention.linear_qkv")} <= row[
        "layers"
    ].keys()
    assert all(share > 0.5 for share in row["layers"].values())
    assert list(row["layers"].values()) == sorted(row["layers"].values(), reverse=True)
    worst = next(iter(row["layers"]))
    assert re.search(rf"now {re.escape(worst)} \d+ %", line)


@pytest.mark.usefixtures("every_step")
def test_a_run_that_is_watched_ends_with_the_same_bits_resumes_and_is_warned_again(prefix: Path, tmp_path: Path, monkeypatch, capsys):
    """Several micro-batches, evaluation, save and resume; the count of checks starts again with the process."""
    shared = {"opt_level": "O2", **NEAREST, "micro_batch_size": 2, "global_batch_size": 6, "eval_iters": 1, "eval_interval": 4, **LOW}
    folder = {"save": str(tmp_path / "saved"), "save_interval": 4}
    rows = tiny.run(tiny.config(prefix, train_iters=8, **shared, **folder))
    assert [row["iteration"] for row in told(rows, "lost_updates")] == [6]
    rows += tiny.run(tiny.config(prefix, train_iters=16, load=folder["save"], **shared, **folder))
    assert [row["iteration"] for row in told(rows, "lost_updates")] == [6, 14]  # checks at 10, 12, 14
    assert len(warnings_of(capsys.readouterr().out)) == 2
    monkeypatch.setattr(lost_updates, "EVERY", 1000)
    unwatched = tiny.run(tiny.config(prefix, train_iters=16, **shared))
    assert tiny.losses(unwatched) == tiny.losses(rows)


@pytest.mark.usefixtures("every_step")
def test_steps_between_checks_run_no_operator_more_and_no_byte_is_counted(prefix: Path):
    with tiny.trainer(tiny.config(prefix, opt_level="O3", train_iters=20, **LOW)) as made:
        training, stream = made.training, made.data.training_batches(made.training)
        train_step(training, stream)
        training.grad_sync.sent.take()
        train_step(training, stream, rare_observers=[made.lost_updates])
        assert made.lost_updates._check is not None
        made.lost_updates.judge()
        first = training.grad_sync.sent.take()
        train_step(training, stream, rare_observers=[made.lost_updates])
        assert made.lost_updates._check is None
        assert training.grad_sync.sent.take() == first


GRIDS: dict[str, dict[str, Any]] = {
    "DP": {"opt_level": "O2"},
    "ZeRO": {"opt_level": "O3"},
    "TP": {"opt_level": "O2", "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP": {"opt_level": "O2", "pipeline_model_parallel_size": 2},
}


def on_every_grid(prefix: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each grid, in the same processes."""
    lost_updates.EVERY, lost_updates.STEPS = 2, 4  # type: ignore[misc]
    shared = {"train_iters": 8, "micro_batch_size": 2, "global_batch_size": 8, "num_attention_heads": 4, **LOW, **NEAREST}
    return {name: told(tiny.run(tiny.config(prefix, **shared, **grid)), "lost_updates") for name, grid in GRIDS.items()}


@pytest.mark.nightly(60)
def test_on_grids_rank_0_warns_of_the_layers_of_all_ranks(gloo_prefix: Path):
    first, second = dist.run(on_every_grid, 2, str(gloo_prefix), timeout=400)
    for name in GRIDS:
        (row,) = first[name]
        assert second[name] == []
        assert row["iteration"] == 6
        assert {f"decoder.layers.{i}.mlp.linear_fc1" for i in range(2)} <= row["layers"].keys(), name
        assert row["layers"][FC1] == pytest.approx(first["DP"][0]["layers"][FC1], abs=0.03), name
