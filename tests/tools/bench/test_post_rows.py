"""Rows out of what runs left, against files made by hand."""

import csv
import json

import pytest

from tools.bench import post_rows

PLACE = {"date", "commit", "gpu", "driver", "torch"}


def lines(file, *found):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")


@pytest.fixture
def runs(tmp_path):
    lines(tmp_path / "runs/ppo/O3/metrics.jsonl", {"step": 1, "reward": 0.25, "kl": 0.0, "seconds": 3.0})
    lines(tmp_path / "runs/sft/O0/metrics.jsonl", {"step": 1, "loss": 2.5, "valid_loss": None},
          {"step": 2, "loss": 2.0, "valid_loss": 2.25})  # fmt: skip
    train = {"kind": "train", "tokens": 640, "loss": 6.0, "grad_norm": 1.0, "tokens_per_s": 9.0, "skipped": 0}
    valid = {"kind": "valid", "iteration": 20, "loss": 5.0, "ppl": 148.4132}
    lines(tmp_path / "runs/encoders/bf16-d/phase1.jsonl", train | {"iteration": 10, "memory_gib": 2.5},
          train | {"iteration": 20, "memory_gib": 2.0}, valid)  # fmt: skip
    seed = {"seed": 1, "accuracy": 0.625, "answered_yes": 1.0, "loss_first": 0.7, "loss_last": 0.6}
    lines(tmp_path / "runs/boolq/bf16-d.json", {"precision": "bf16", "steps": 9, "majority": 0.6, "rows": {"dev": 8}, "seeds": [seed]})
    piqa = {"acc": 0.5, "acc_stderr": 0.1, "samples": 40}
    text = {"bits_per_byte": 1.25, "documents": 3}
    about = {"kind": "llama", "precision": "bfloat16"}
    lines(tmp_path / "runs/evaluation/before.json", {"smollm2": {"about": about, "results": {"piqa": piqa, "text": text}}})
    return tmp_path


def read(folder, name):
    with (folder / f"{name}.csv").open(newline="") as stream:
        return [{key: value for key, value in row.items() if key not in PLACE} for row in csv.DictReader(stream)]


def test_each_run_gives_its_rows(runs):
    out = runs / "out"
    assert post_rows.main(["--runs", str(runs / "runs"), "--out", str(out), "--commit", "abc1234"]) == 0
    curve = {"run": "sft", "recipe": "O0", "step": "2", "quantity": "valid_loss", "value": "2.25"}
    assert curve in read(out, "post_curves")
    assert {row["quantity"] for row in read(out, "post_curves") if row["run"] == "ppo"} == {"reward", "kl"}
    assert read(out, "encoders") == [
        {"precision": "bf16-d", "phase": "phase1", "steps": "20", "tokens": "640", "train_loss": "6.0000", "valid_loss": "5.0000",
         "ppl": "148.413", "peak_gib": "2.500"}
    ]  # fmt: skip
    assert [(row["precision"], row["seed"], row["accuracy"], row["majority"]) for row in read(out, "boolq")] == [
        ("bf16-d", "1", "0.6250", "0.6000")
    ]
    told = [(row["task"], row["metric"], row["value"], row["stderr"], row["samples"]) for row in read(out, "evaluation")]
    assert told == [("piqa", "acc", "0.5", "0.1", "40"), ("text", "bits_per_byte", "1.25", "", "3")]
    assert "abc1234" in (out / "evaluation.csv").read_text()


def test_what_holds_nothing_or_is_damaged_is_refused(runs, capsys):
    (runs / "empty").mkdir()
    for folder, part in (("none", "is not a folder"), ("empty", "contains none of these runs")):
        assert post_rows.main(["--runs", str(runs / folder), "--out", str(runs / "out")]) == 2
        assert part in capsys.readouterr().err
    (runs / "runs/evaluation/before.json").write_text("{")
    assert post_rows.main(["--runs", str(runs / "runs"), "--out", str(runs / "out")]) == 2
    assert "is not valid JSON" in capsys.readouterr().err
    assert not (runs / "out").exists()


def test_a_phase_without_an_evaluation_is_refused(runs):
    file = runs / "runs/encoders/bf16-d/phase1.jsonl"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if '"valid"' not in line))
    with pytest.raises(ValueError, match="has no evaluation"):
        list(post_rows.encoders(runs / "runs"))
