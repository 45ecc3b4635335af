"""The search and the table on a pretended GPU; what a trial is told, by the benchmark's own parser; how a trial ends, by real processes."""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import bench_step
from tools.reproduce import coat_memory
from tools.reproduce.coat_memory import largest, measure

OPTIONS = argparse.Namespace(preset="125m", flags="--seq-length 64", warm_up=1, steps=2)


@pytest.mark.parametrize("limit", [*range(12), 31, 32, 33, 100, 1000])
@pytest.mark.parametrize("start", [1, 4])
def test_the_largest_that_fits_to_an_eighth(start: int, limit: int):
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = largest(fits, start)
    assert len(tried) == len(set(tried))
    if limit < start:
        assert (found, tried) == (0, [start])
    else:
        assert found <= limit < found + max(1, found // 8)


def test_a_trial_is_told_its_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told: list[Any] = []
    monkeypatch.setattr(bench_step.process_groups, "initialize", lambda config: None)
    monkeypatch.setattr(bench_step, "measure", lambda level, options: told.append(bench_step.configuration(level, options)) or {})
    words = coat_memory.command("O3 --optimizer-state coat --save-activations coat", 12, OPTIONS, str(tmp_path))
    assert words[1:3] == ["-m", "tools.bench.bench_step"]
    assert bench_step.main(words[3:]) == 0
    (config,) = told
    assert (config.precision.name, config.precision.optimizer_state, config.precision.save_activations) == ("O3", "coat", "coat")
    assert (config.training.micro_batch_size, config.model.hidden_size, config.model.seq_length) == (12, 768, 64)


ROW = {"case": "O3", "ms": 1.5, "tokens_s_gpu": 7, "peak_gib": 3.0, "rest_gib": 2.0, "loss": 4.0}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (f"print('{{chatter'[1:]); print({json.dumps(ROW)!r})", {"ms": 1.5, "tokens_s_gpu": 7, "peak_gib": 3.0, "rest_gib": 2.0}),
        ("raise SystemExit('torch.OutOfMemoryError: CUDA out of memory. Tried')", dict.fromkeys(coat_memory.MEASURED, "")),
        ("raise SystemExit('RuntimeError: CUBLAS_STATUS_ALLOC_FAILED')", dict.fromkeys(coat_memory.MEASURED, "")),
    ],
)
def test_how_a_trial_ends(program: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coat_memory, "command", lambda *_: [sys.executable, "-c", program])
    assert measure("O3", 4, OPTIONS) == expected


def test_a_trial_that_fails_otherwise_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coat_memory, "command", lambda *_: [sys.executable, "-c", "raise SystemExit('no such flag')"])
    with pytest.raises(RuntimeError, match="O3 with micro-batch 4 failed with 1:\nno such flag"):
        measure("O3", 4, OPTIONS)


def pretend(trials: list[tuple[str, int]]):
    """A GPU of 40 GiB on which a token takes 1 ms in bf16 and half of it otherwise; bf16 takes 10 GiB and 2 a sample, others half."""

    def run(case: str, micro_batch: int, options: argparse.Namespace) -> dict[str, Any]:
        trials.append((case, micro_batch))
        part = 1.0 if case == "bf16" else 0.5
        peak = part * (10 + 2 * micro_batch)
        if peak > 40:
            return dict.fromkeys(coat_memory.MEASURED, "")
        return {"ms": part * micro_batch, "tokens_s_gpu": 1000 / part, "peak_gib": peak, "rest_gib": 10 * part}

    return run


def test_the_table_by_hand_and_a_call_that_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trials: list[tuple[str, int]] = []
    monkeypatch.setattr(coat_memory, "measure", pretend(trials))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(coat_memory.rows, "machine", lambda commit: {"date": str(len(trials)), "commit": commit, "gpu": "one"})
    arguments = ["--csv", str(tmp_path / "rows.csv"), "--commit", "abc", "--micro-batch-size", "4", "--cases"]
    assert coat_memory.main([*arguments, "bf16"]) == 0
    assert [size for _, size in trials] == [4, 8, 16, 12, 14, 15]
    assert coat_memory.main([*arguments, "bf16", "O3 --save-activations coat"]) == 0
    assert [size for case, size in trials if case == "bf16"] == [4, 8, 16, 12, 14, 15]
    assert [size for case, size in trials if case != "bf16"] == [4, 8, 16, 32, 64, 48, 40, 36]
    *_, bf16, coat = capsys.readouterr().out.splitlines()
    assert bf16 == "| bf16 | 4 | 4.0 | 1000.0 | 18.0 | 1.0 | 1.0 | 15 | 1000.0 | 1.0 |"
    assert coat == "| O3 --save-activations coat | 4 | 2.0 | 2000.0 | 9.0 | 2.0 | 2.0 | 32 | 2000.0 | 2.0 |"
    with (tmp_path / "rows.csv").open(newline="") as stream:
        written = list(csv.DictReader(stream))
    assert [(row["case"], int(row["micro_batch"])) for row in written] == trials
    assert [row["micro_batch"] for row in written if row["ms"] == ""] == ["16", "64", "48", "40", "36"]
    assert coat_memory.main(["--csv", str(tmp_path / "rows.csv"), "--commit", "abd", "--micro-batch-size", "64", "--cases", "bf16"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| bf16 | 64 |  |  |  |  |  | 0 |  |  |"
