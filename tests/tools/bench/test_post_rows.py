"""Rows from what runs left, against files written by hand."""

import csv
import json

import pytest

from tools.bench import post_rows


def lines(file, *entries):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


@pytest.fixture
def runs(tmp_path):
    lines(tmp_path / "runs/sft/O0/metrics.jsonl", {"step": 2, "loss": 2.0, "valid_loss": 2.25})
    train = {
        "kind": "train",
        "iteration": 20,
        "tokens": 640,
        "loss": 6.0,
        "grad_norm": 1.0,
        "tokens_per_s": 9.0,
        "memory_gib": 2.5,
        "skipped": 0,
    }
    valid = {"kind": "valid", "iteration": 20, "loss": 5.0, "ppl": 148.4132}
    lines(tmp_path / "runs/encoders/bf16-d/phase1.jsonl", train, valid)
    seed = {"seed": 1, "accuracy": 0.625, "answered_yes": 1.0, "loss_first": 0.7, "loss_last": 0.6}
    lines(tmp_path / "runs/boolq/bf16-d.json", {"precision": "bf16", "steps": 9, "majority": 0.6, "rows": {"dev": 8}, "seeds": [seed]})
    piqa = {"acc": 0.5, "acc_stderr": 0.1, "samples": 40}
    about = {"kind": "llama", "precision": "bfloat16"}
    lines(tmp_path / "runs/evaluation/before.json", {"smollm2": {"about": about, "results": {"piqa": piqa}}})
    return tmp_path


def test_each_run_gives_its_rows(runs):
    assert post_rows.main(["--runs", str(runs / "runs"), "--out", str(runs / "out"), "--commit", "abc1234"]) == 0
    rows = {}
    for name in post_rows.FILES:
        with (runs / "out" / f"{name}.csv").open(newline="") as stream:
            rows[name] = [list(row.values())[5:] for row in csv.DictReader(stream)]
    assert rows == {
        "post_curves": [["sft", "O0", "2", "loss", "2"], ["sft", "O0", "2", "valid_loss", "2.25"]],
        "encoders": [["bf16-d", "phase1", "20", "640", "6.0000", "5.0000", "148.413", "2.500"]],
        "boolq": [["bf16-d", "bf16", "1", "9", "0.6250", "0.6000", "1.0000", "0.7000", "0.6000", "8"]],
        "evaluation": [["smollm2", "llama", "bfloat16", "piqa", "acc", "0.5", "0.1", "40"]],
    }


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        (None, None, "none of these runs"),
        ("evaluation/before.json", "{", "before.json"),
        ("encoders/bf16-d/phase1.jsonl", '{"kind": "train"}', "phase1.jsonl"),
    ],
)
def test_what_is_empty_or_damaged_is_refused(runs, capsys, file, text, word):
    folder = runs / ("runs" if file else "empty")
    folder.mkdir(exist_ok=True)
    if file:
        (folder / file).write_text(text)
    assert post_rows.main(["--runs", str(folder), "--out", str(runs / "out")]) == 2
    assert word in capsys.readouterr().err
    assert not (runs / "out").exists()
