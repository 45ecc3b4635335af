"""Data named by files, --data-args-path and --per-split-data-args-path, in whole runs through the entry point."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny
from megatron.lm import pretrain

FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--micro-batch-size 2 --global-batch-size 4 --lr 5e-3 --eval-iters 1 --eval-interval 2 --log-interval 1 --lr-decay-iters 4"
)

pytestmark = pytest.mark.usefixtures("alone")


def told(rows: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    return [(row["kind"], row["iteration"], row["loss"]) for row in rows if row["kind"] in ("train", "valid", "test")]


def test_a_blend_for_each_split_trains_evaluates_and_resumes(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = tiny.write_data(tmp_path, "other")
    blends, train = tmp_path / "blends.json", [3, str(prefix), 1, str(other)]
    blends.write_text(json.dumps({"train": train, "valid": [str(other)], "test": str(prefix)}))
    file, save = ["--per-split-data-args-path", str(blends)], ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    flags = ["--train-data-path", *map(str, train), "--valid-data-path", str(other), "--test-data-path", str(prefix)]
    expected = told(tiny.command(tmp_path, *FLAGS, "--train-iters", "4", *flags))
    assert {kind for kind, _, _ in expected} == {"train", "valid", "test"}
    capsys.readouterr()
    assert told(tiny.command(tmp_path, *FLAGS, "--train-iters", "4", *file)) == expected
    assert f"data: {prefix} 75.00 %, {other} 25.00 %" in capsys.readouterr().out.replace("\n    ", " ")

    tiny.command(tmp_path, *FLAGS, "--train-iters", "2", *file, *save)
    resumed = told(tiny.command(tmp_path, *FLAGS, "--train-iters", "4", *file, *save))
    assert resumed == [row for row in expected if row[1] > 2]

    blends.write_text(json.dumps({"train": [1, str(prefix), 1, str(other)], "valid": [str(other)], "test": str(prefix)}))
    capsys.readouterr()
    assert pretrain.main([*FLAGS, "--train-iters", "6", *file, *save]) == 2
    assert f"weight 0.5 of {prefix} (saved: 0.75)" in capsys.readouterr().err
