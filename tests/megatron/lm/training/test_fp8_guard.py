"""`--fp8-guard` in whole runs: what it logs, that it resumes bit for bit, and that every grid decides and computes the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import dist, tiny
from megatron.lm.config import Config
from megatron.lm.run.announce import describe_guard
from megatron.lm.step import train_step
from megatron.lm.training.fp8_guard import check_guard, guarded

# No cast keeps this bound, so all layers are raised in the second check, after iteration 4.
STRICT: dict[str, Any] = {"fp8_guard": True, "fp8_guard_interval": 2, "fp8_guard_sqnr": 90.0, "swiglu": True, "disable_bias_linear": True}
RAISED_AT, LAYERS = 4, 8


def settings(folder: Path, level: str = "O2", **changes: Any) -> Config:
    data = folder / "corpus" if (folder / "corpus.bin").exists() else tiny.write_data(folder)
    return tiny.config(data, **STRICT | {"opt_level": level, "train_iters": 8} | changes)


def guard_rows(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["iteration"], row["layer"], row["raised"]) for row in rows if row["kind"] == "fp8_guard"]


def test_it_raises_logs_records_and_resumes_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record = {"record_precision": str(tmp_path / "record.jsonl"), "record_interval": 2, "eval_interval": 2, "eval_iters": 1}
    rows = tiny.run(settings(tmp_path, **record))
    whole, printed = tiny.losses(rows), " ".join(capsys.readouterr().out.split())
    assert "FP8 guard: 8 linear layers, checked every 2 steps for saturation 0.001, underflow 0.5, SQNR 90 dB" in printed
    assert "iteration 4, --fp8-guard: decoder.layers.0.self_attention.linear_qkv computes in BF16 from now on: input SQNR 3" in printed
    changes = guard_rows(rows)
    assert len(changes) == LAYERS
    assert {(iteration, raised) for iteration, _, raised in changes} == {(RAISED_AT, True)}
    lines = {line["iteration"]: line for line in map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())}
    assert lines[4]["raised"] == {}
    assert lines[6]["raised"].keys() == {layer for _, layer, _ in changes}
    assert lines[6]["raised"]["decoder.layers.1.mlp.linear_fc2"]["since"] == RAISED_AT
    assert lines[6]["casts"].keys() == lines[4]["casts"].keys(), "the casts of a raised layer are still measured"
    plain = tiny.losses(tiny.run(settings(tmp_path, fp8_guard_sqnr=0.0)))
    assert plain[:RAISED_AT] == whole[:RAISED_AT]
    assert plain[RAISED_AT:] != whole[RAISED_AT:]
    assert plain == pytest.approx(whole, abs=0.02)
    for at in (3, 5):  # after the first bad check, and while all are raised
        saved = settings(tmp_path, save=str(tmp_path / f"at{at}"), exit_interval=at)
        first = tiny.losses(tiny.run(saved))
        again = replace(saved, checkpoint=replace(saved.checkpoint, load=saved.checkpoint.save, save=None))
        again = replace(again, training=replace(again.training, exit_interval=None))
        assert first + tiny.losses(tiny.run(again)) == whole
    assert (
        json.loads((tmp_path / "at5/iter_0000005/checkpoint.json").read_text())["fp8_guard"]["layers"].keys() == lines[6]["raised"].keys()
    )
    capsys.readouterr()
    tiny.run(settings(tmp_path, load=str(tmp_path / "at5"), fp8_guard=False, fp8_guard_interval=50, fp8_guard_sqnr=15.0))
    printed = capsys.readouterr().out
    assert "the saved run's --fp8-guard had raised 8 layers to BF16, such as decoder.layers.0.self_attention.linear_" in printed
    assert "without --fp8-guard they compute as the recipe says" in printed
    tiny.run(settings(tmp_path, load=str(tmp_path / "at5"), bf16_linears=("linear_qkv",), train_iters=6))
    printed = capsys.readouterr().out
    assert "had raised 2 layers to BF16, such as decoder.layers.0.self_attention.linear_qkv; since they are not FP8 layers now" in printed


def test_a_measured_step_keeps_the_bits(tmp_path: Path):
    changes = {"train_iters": 4, "fp8_guard_sqnr": 0.0}
    measured = tiny.losses(tiny.run(settings(tmp_path, **changes)))
    off = {"fp8_guard": False, "fp8_guard_interval": 50, "fp8_guard_sqnr": 15.0}
    assert tiny.losses(tiny.run(settings(tmp_path, **changes | off))) == measured


def test_a_layer_returns_and_a_failed_step_measures_nothing(tmp_path: Path):
    run = settings(tmp_path, fp8_guard_interval=1, fp8_guard_raise_after=1, fp8_guard_return_after=2)
    with tiny.trainer(run) as made:
        training, batches = made.training, tiny.micro_batches(run)
        guard = training.guard
        assert guard is not None

        def step(sqnr: float) -> bool:
            guard.bounds = replace(guard.bounds, sqnr_db=sqnr)
            with guarded(training, training.iteration + 1):
                train_step(training, batches)
            return bool(check_guard(training, training.iteration))

        assert [step(sqnr) for sqnr in (90.0, 0.0, 0.0, 0.0)] == [True, False, True, False]
        assert not guard.raised
        assert describe_guard(guard).endswith("SQNR 0 dB, shrinkage 0.02")
        with pytest.raises(KeyboardInterrupt), guarded(training, 5):
            raise KeyboardInterrupt
        assert not guard.armed


def of_grid(data: str, level: str, changes: dict[str, Any]) -> tuple[list[float], list[tuple[Any, ...]], dict[str, float]]:
    run = tiny.config(data, **STRICT | {"opt_level": level, "train_iters": 8, "global_batch_size": 8} | changes)
    rows = tiny.run(run)
    sent = next((row["sent_bytes"] for row in reversed(rows) if row["kind"] == "train"), {})
    return tiny.losses(rows), guard_rows(rows), {name: size for name, size in sent.items() if name.startswith("activation")}


GRIDS: dict[str, dict[str, Any]] = {
    "data": {},
    "zero": {"use_distributed_optimizer": True},
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "stages": {"pipeline_model_parallel_size": 2},
}
QUICK = {("sequence", "O3"), ("stages", "O2")}
CASES = [
    pytest.param(grid, level, marks=() if (grid, level) in QUICK else pytest.mark.nightly(8))
    for grid in GRIDS
    for level in ("O1", "O2", "O3")
]


@pytest.mark.parametrize(("grid", "level"), CASES)
def test_every_grid_raises_the_same_layers_and_computes_the_same(tmp_path: Path, grid: str, level: str):
    data = str(tiny.write_data(tmp_path))
    alone, changes, _ = dist.run(of_grid, 1, data, level, {}, init=False)[0]
    losses, theirs, sent = dist.run(of_grid, 2, data, level, GRIDS[grid], init=False)[0]
    assert len(theirs) == LAYERS
    assert set(theirs) == set(changes)
    assert losses == pytest.approx(alone, abs=0.02)
    if (grid, level) == ("sequence", "O2"):  # as a layer of O0: the input twice, its gradient, the output and its gradient, in BF16
        plain = {"fp8_guard": False, "fp8_guard_interval": 50, "fp8_guard_sqnr": 15.0, "fp8_min_gain": 0.0}
        _, _, wide = dist.run(of_grid, 2, data, "O0", GRIDS[grid] | plain, init=False)[0]
        assert sent == wide
