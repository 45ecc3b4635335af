"""A model continued at several precisions: what each run is told, the table by hand, and a tiny model through all runs."""

import argparse
import csv
import json
import sys
from pathlib import Path

import pytest

from helpers import tiny
from megatron.lm.config.cli import parse_args
from tools.reproduce import compare_precisions, continue_model
from tools.reproduce.continue_model import JUDGED, OWN, PLAIN, START, command, job, sentences

COMMON = "--preset 125m --train-iters 8 --lr 1e-4 --micro-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 64"


def options(folder: Path, flags: str = COMMON, **more: object) -> argparse.Namespace:
    return argparse.Namespace(load=folder / "start", out=folder / "out", flags=flags, cases=["O0", "O3"], seeds=2, processes=1, **more)


def test_each_run_is_told_its_model_layers_and_rate(tmp_path: Path):
    told = options(tmp_path)
    own, plain, start = (parse_args(command(job("O3", measure, 1, 8), told)[3:]) for measure in (OWN, PLAIN, START))
    assert [config.precision.name for config in (own, plain, start)] == ["O3", "bf16", "O3"]
    assert own.precision.fp8_min_gain == 0.0, "an FP8 case is not BF16 because its layers are small"
    assert [config.checkpoint.load for config in (own, plain, start)] == [
        str(tmp_path / "start"),
        str(tmp_path / "out/O3_1_own/checkpoint"),
        str(tmp_path / "start"),
    ]
    assert all(config.checkpoint.finetune and config.training.seed == 1235 for config in (own, plain, start))
    assert (own.optimizer.lr, own.training.train_iters, own.training.eval_interval) == (1e-4, 8, 8)
    assert (start.optimizer.lr, start.optimizer.weight_decay) == (1e-30, 0.0)
    assert (own.checkpoint.save, start.checkpoint.save) == (str(tmp_path / "out/O3_1_own/checkpoint"), None)


RUN = """
import json, sys
name, steps, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
open(f"{folder}/started.txt", "a").write(name + "\\n")
losses = json.load(open(f"{folder}/losses.json"))
if name not in losses:
    sys.exit(1)
with open(f"{folder}/out/{name}/metrics.jsonl", "w") as stream:
    for line in ({"kind": "train", "iteration": steps, "loss": 9.0}, {"kind": "valid", "iteration": steps, "loss": losses[name]}):
        stream.write(json.dumps(line) + "\\n")
"""


def test_the_table_by_hand_over_the_runs_that_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    losses = {f"{case}_{number}_start": loss for case, loss in (("bf16", 3.0), ("O3", 3.1)) for number in (0, 1)}
    losses |= {"O0_0_own": 2.0, "O0_1_own": 2.2, "O3_0_own": 2.1, "O3_1_own": 2.3, "O0_0_bf16": 2.0, "O0_1_bf16": 2.2, "O3_0_bf16": 2.0}
    (tmp_path / "losses.json").write_text(json.dumps(losses))
    monkeypatch.setattr(continue_model, "command", lambda one, told: [sys.executable, "-c", RUN, one.name, str(one.steps), str(tmp_path)])
    words = ["--load", str(tmp_path), "--out", str(tmp_path / "out"), "--cases", "O0", "O3", "--seeds", "2", "--flags", COMMON]
    assert continue_model.main(words) == 1
    printed = capsys.readouterr().out
    assert "missing: O3_1_bf16" in printed
    with (tmp_path / "out/continued.csv").open(newline="") as stream:
        table = [[row[column] for column in continue_model.COLUMNS] for row in csv.DictReader(stream)]
    assert table == [
        ["O0", "1234", "3.0", "3.0", "2.0", "2.0"],
        ["O0", "1235", "3.0", "3.0", "2.2", "2.2"],
        ["O3", "1234", "3.0", "3.1", "2.1", "2.0"],
    ]
    assert "in its own layers: O3 against O0: +0.1000 nats per token, +5.00 %, one seed" in printed
    (tmp_path / "losses.json").write_text(json.dumps(losses | {"O3_1_bf16": 2.2}))
    (tmp_path / "started.txt").unlink()
    assert continue_model.main(words) == 0
    assert (tmp_path / "started.txt").read_text() == "O3_1_bf16\n", "what is complete is not repeated"
    assert "in BF16 layers: O3 against O0: +0.0000 nats per token" in capsys.readouterr().out


def test_another_command_is_refused_and_a_start_that_fails_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ["--load", str(tmp_path), "--out", str(tmp_path / "out"), "--cases", "O3", "--seeds", "1", "--flags"]
    started = []
    monkeypatch.setattr(compare_precisions.subprocess, "Popen", lambda command, **_: started.append(command) or Failed())
    assert continue_model.main([*words, COMMON]) == 1
    assert len(started) == 2, "the two runs that judge the start; no training follows"
    assert "missing: bf16_0_start, O3_0_start, O3_0_own, O3_0_bf16" in capsys.readouterr().out
    assert continue_model.main([*words, COMMON.replace("1e-4", "2e-4")]) == 2
    assert "is of a run with other flags or another --load: give another --out" in capsys.readouterr().err
    assert len(started) == 2


class Failed:
    def wait(self, limit=None):
        return 2


def test_without_a_baseline_nothing_is_compared():
    assert list(sentences([{"case": "O3", "seed": 1, "own": 2.0, "bf16": 2.0}], "O0")) == []


def test_the_steps_are_asked_for(capsys: pytest.CaptureFixture[str]):
    assert continue_model.main(["--load", "x", "--flags", "--preset 125m"]) == 2
    assert "--flags has no --train-iters N" in capsys.readouterr().err


@pytest.mark.nightly(60)
def test_a_tiny_model_goes_through_all_runs(tmp_path: Path):
    prefix = tiny.write_data(tmp_path)
    start = tmp_path / "start"
    tiny.run(tiny.config(prefix, opt_level="O0", train_iters=30, save=str(start)))
    flags = (
        f"--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --make-vocab-size-divisible-by 32 --data-path {prefix} "
        f"--tokenizer-type NullTokenizer --vocab-size {tiny.VOCABULARY} --split 80,15,5 --micro-batch-size 4 --train-iters 30 --lr 5e-3 "
        "--fp8-min-gain 0 --eval-iters 4 --log-interval 1"
    )
    words = ["--load", str(start), "--out", str(tmp_path / "out"), "--cases", "O0", "O3", "--seeds", "1", "--flags", flags]
    assert continue_model.main(words) == 0
    with (tmp_path / "out/continued.csv").open(newline="") as stream:
        wide, low = ({name: float(row[name]) for name in continue_model.COLUMNS[2:]} for row in csv.DictReader(stream))
    assert wide["start"] == wide["start_bf16"] == low["start_bf16"]
    assert wide["own"] == wide["bf16"] < wide["start"]
    assert low["start"] != low["start_bf16"]
    assert low["own"] == pytest.approx(wide["own"], rel=0.02)
    assert low["bf16"] == pytest.approx(low["own"], rel=0.02)
    assert len(continue_model.read_run("x", tmp_path / "out/O3_0_start/metrics.jsonl").train) >= 1
    assert JUDGED > 16
