"""Both trainings of a toy chat model in processes of their own, what continues, and what is refused."""

import csv
import json
from pathlib import Path

import pytest

from helpers import post_runs
from tools.reproduce import compare_tuning
from tools.reproduce.compare_tuning import Job, words_of

SFT = "--dtype fp32 --seq-length 64 --lr 3e-3 --train-iters 6 --micro-batch-size 4 --global-batch-size 4 --lr-warmup-iters 0 --valid-rows 4"
DPO = SFT.replace("--valid-rows 4", "--valid-rows 2 --dtype bf16")


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tuning")
    post_runs.toy(folder / "toy")
    post_runs.sums(folder / "sums.jsonl")
    pairs = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"perhaps {n}?"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    data = ["--load", str(folder / "toy"), "--sft", str(folder / "sums.jsonl"), "--dpo", str(folder / "pairs.jsonl")]
    return [*data, "--seeds", "1", "--commit", "abc", "--cases", "O2", f"--sft-flags={SFT}", f"--dpo-flags={DPO}"]


def table(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "tuning.csv").open(newline="") as stream:
        return {(row["task"], row["case"]): row for row in csv.DictReader(stream)}


def perform_here(jobs, options, argv, end):
    for job in jobs:
        if not compare_tuning.complete(job, options):
            compare_tuning.main([*argv, "--only", job.task, job.case, str(job.seed)])


def test_both_tasks_are_trained_and_judged_twice(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_tuning, "run_all", perform_here)
    arguments = [*words, "--out", str(tmp_path)]
    assert compare_tuning.main(arguments) == 0
    found = table(tmp_path)
    assert list(found) == [("sft", "start"), ("dpo", "start"), ("dpo", "O2"), ("sft", "O2")]
    before, after = (float(found["sft", case]["bf16_loss"]) for case in ("start", "O2"))
    assert after < 0.97 * before
    assert float(found["sft", "O2"]["own_loss"]) == pytest.approx(after, rel=0.02)  # the same weights in other layers
    assert found["sft", "O2"]["own_loss"] != found["sft", "O2"]["bf16_loss"]
    assert float(found["dpo", "start"]["bf16_loss"]) == pytest.approx(0.693147, abs=1e-5)  # the reference itself
    assert float(found["dpo", "O2"]["bf16_loss"]) < 0.6
    assert found["dpo", "O2"]["bf16_accuracy"] == "1.0"
    assert "| sft | O2 | 1 | " in capsys.readouterr().out
    assert not list(tmp_path.glob("*/run"))  # neither models nor checkpoints

    def nothing(job, options):
        raise AssertionError(f"{job.name} was complete")

    monkeypatch.setattr(compare_tuning, "perform", nothing)
    assert compare_tuning.main(arguments) == 0


def test_runs_are_processes_whose_failures_are_named(words, tmp_path, monkeypatch, capsys):
    """As below, of a program that only fails."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(compare_tuning.sys, "executable", str(program))
    assert compare_tuning.main([*words[:2], *words[words.index("--dpo") :], "--out", str(tmp_path / "out"), "--cases", "O2"]) == 1
    told = capsys.readouterr().out
    for case in ("start", "O2"):
        assert f"dpo_{case}_1234: failed with 3, see {tmp_path}/out/dpo_{case}_1234/log.txt" in told
        log = (tmp_path / f"out/dpo_{case}_1234/log.txt").read_text()
        assert log.startswith(f"-m tools.reproduce.compare_tuning --load={words[1]} ")
        assert log.endswith(f" --only dpo {case} 1234\n")
    assert told.endswith("missing: dpo_start_1234, dpo_O2_1234\n")
    assert not (tmp_path / "out/tuning.csv").exists()


@pytest.mark.nightly(12)
@pytest.mark.usefixtures("uncompiled")
def test_a_run_is_a_process_and_one_that_fails_is_named(words, tmp_path, capsys):
    data = words[words.index("--dpo") :]  # without --sft
    assert compare_tuning.main([*words[:2], *data, "--out", str(tmp_path), "--cases", "O9"]) == 1
    told = capsys.readouterr().out
    assert "dpo_start_1234: done" in told
    assert f"dpo_O9_1234: failed with 1, see {tmp_path}/dpo_O9_1234/log.txt" in told
    assert told.endswith("missing: dpo_O9_1234\n")
    assert "'O9' is unknown" in (tmp_path / "dpo_O9_1234/log.txt").read_text()
    assert list(table(tmp_path)) == [("dpo", "start")]


def test_without_time_nothing_is_started(words, tmp_path, capsys):
    assert compare_tuning.main([*words, "--out", str(tmp_path), "--minutes", "1e-9"]) == 1
    assert capsys.readouterr().out == "missing: sft_start_1234, dpo_start_1234, dpo_O2_1234, sft_O2_1234\n"


def test_a_case_passes_its_flags_to_the_script(words, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(compare_tuning, "run_all", lambda jobs, options, argv, end: seen.append((jobs, options)))
    case = "O3 --master-rounding nearest --moment-rounding stochastic --lr 5e-4"  # its learning rate instead of DPO's
    assert compare_tuning.main([*words, "--out", str(tmp_path), "--cases", case, "--seeds", "2"]) == 1
    ((jobs, options),) = seen
    assert [(job.task, job.case, job.seed) for job in jobs[2:]] == [(task, case, seed) for seed in (1234, 1235) for task in ("dpo", "sft")]
    job = Job(task="dpo", case=case, seed=7)
    assert job.name == "dpo_O3-master-rounding-nearest-moment-rounding-stochastic-lr-5e-4_7"
    args = post_runs.example("rlhf/dpo.py").parse(words_of(job, options))
    assert (args.opt_level, args.master_rounding, args.moment_rounding) == ("O3", "nearest", "stochastic")
    assert (args.lr, args.seed, args.train_iters, args.valid_rows) == (5e-4, 7, 6, 2)
