"""The table by hand, from trainings that only write metrics; what they are told, by the trainer's own parser."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.lm.config.cli import parse_args
from megatron.lm.config.rules.training import schedule
from tools.docs import tables
from tools.reproduce import compare_precisions, keep, queries
from tools.reproduce.compare_precisions import COLUMNS, Job, against_base, command, complete, train


def options(folder: Path, flags: str = "") -> argparse.Namespace:
    return argparse.Namespace(data="there", out=folder, flags=flags, processes=1)


def metrics(job: Job, loss: float, speed: float) -> str:
    lines = [{"kind": "precision", "bytes_per_parameter": {"weight": 2.0, "m": 4.0}}]
    lines += [{"kind": "train", "iteration": i, "tokens": i, "loss": 5.0, "tokens_per_s": speed * i, "memory_gib": i} for i in (1, 2, 3)]
    lines += [{"kind": "valid", "iteration": i, "tokens": 10 * i, "loss": x} for i, x in ((job.steps // 2, 7.0), (job.steps, loss))]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_training_is_told_its_precision_seed_and_course(tmp_path: Path):
    job = Job(precision="O2", seed=7, steps=98, name="O2_0")
    words = command(job, options(tmp_path / "with a blank", "--adam-beta2 0.999"))
    assert words[1:3] == ["-m", "megatron.lm.pretrain"]
    config = parse_args(words[3:])
    assert (config.precision.name, config.training.seed, config.training.train_iters) == ("O2", 7, 98)
    assert config.optimizer.adam_beta2 == 0.999
    assert config.logging.metrics_file == str(tmp_path / "with a blank" / "O2_0" / "metrics.jsonl")
    assert (config.training.global_batch_size, config.training.eval_interval) == (4, 25)  # with 24 the last two would be 2 steps apart


def test_the_table_by_hand_and_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    losses = {("bf16", 1234): 4.0, ("bf16", 1235): 4.2, ("O2", 1234): 4.3}
    started = []

    def pretend(job: Job, options: argparse.Namespace) -> list[str]:
        started.append(job.name)
        path, text = options.out / job.name / "metrics.jsonl", metrics(job, losses[job.precision, job.seed], 100.0)
        return [sys.executable, "-c", f"open({str(path)!r}, 'w').write({text!r})"]

    monkeypatch.setattr(compare_precisions, "command", pretend)
    arguments = ["--out", str(tmp_path), "--precisions", "bf16", "O2", "--seeds", "bf16=2", "--steps", "8"]
    assert compare_precisions.main(arguments) == 0
    assert started == ["bf16_0", "O2_0", "bf16_1"]
    first, second = tables.read(str(tmp_path / "precisions.csv"))
    assert [first[column] for column in COLUMNS] == ["bf16", "2", "4.1", "4.0", "4.2", "+0.00 %", "0.00 %", "250", "3", "6.0"]
    assert [second[column] for column in COLUMNS[:7]] == ["O2", "1", "4.3", "4.3", "4.3", "+7.50 %", ""]
    told = capsys.readouterr().out
    assert (first["command"].rpartition("compare_precisions.py ")[2], "| O2 | 1 | 4.3 |" in told) == (" ".join(arguments), True)
    assert "O2 against bf16: +0.3000 nats per token, +7.50 %, one seed, no interval: not shown" in told
    assert compare_precisions.main([*arguments, "--at-once", "2"]) == 0
    assert started[3:] == ["bf16_alone", "O2_alone"]


def test_pairs_are_added_to_those_on_file_while_time_permits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = []

    def pretend(job: Job, options: argparse.Namespace) -> list[str]:
        started.append(job.name)
        path, text = options.out / job.name / "metrics.jsonl", metrics(job, 4.0 + 0.1 * (job.precision == "O3") + job.seed % 10, 100.0)
        return [sys.executable, "-c", f"import time; time.sleep(0.4); open({str(path)!r}, 'w').write({text!r})"]

    monkeypatch.setattr(compare_precisions, "command", pretend)
    first, second = tmp_path / "first", tmp_path / "second"
    arguments = ["--precisions", "bf16", "O3", "--seeds", "bf16=3", "O3=3", "--steps", "8", "--no-speed"]
    clock = iter(range(0, 1000, 2)).__next__  # a run takes two seconds, and asking another two
    monkeypatch.setattr(compare_precisions.time, "monotonic", clock)
    assert compare_precisions.main(["--out", str(first), *arguments, "--seconds", "9"]) == 1
    assert started == ["bf16_0", "O3_0"]
    assert compare_precisions.main(["--out", str(second), *arguments, "--on-file", str(first)]) == 0
    assert started[2:] == ["bf16_1", "O3_1", "bf16_2", "O3_2"]
    assert [(row["seeds"], row["on_file"]) for row in tables.read(str(second / "precisions.csv"))] == [("3", "1"), ("3", "1")]
    assert {row["run"] for row in tables.read(str(second / "curves.csv"))} == {f"{name}_{k}" for name in ("bf16", "O3") for k in range(3)}
    monkeypatch.setitem(tables.FOLDERS, "reproduce", str(tmp_path))
    monkeypatch.setitem(queries.QUERIES, "long_125m", queries.QUERIES["long_125m"] | {"folder": "reproduce/second"})
    found = list(queries.findings("long_125m"))
    assert next(one.ours for one in found if "mean" in one.quantity) == pytest.approx(100 / 3 * (0.1 / 8 + 0.1 / 9 + 0.1 / 10))
    apart = [(one.seed, one.x, round(one.ours, 9)) for one in found if "above BF16" in one.quantity and one.x]
    assert apart == [(1234 + n, x, distance) for n in range(3) for x, distance in ((40, 0.0), (80, 0.1))]
    assert against_base({1: None, 2: None}, {1: None}) is None  # seed 2 has no baseline
    rows = [keep.row_of(one, dict.fromkeys(keep.COLUMNS, "")) for one in found]
    assert keep.curve("bf16 at 125M", rows) == [(40, 7.0), (80, 8.0), (40, 7.0), (80, 9.0), (40, 7.0), (80, 10.0)]  # for the cost in tokens


@pytest.mark.parametrize("left", ['{"kind": "precision"}\n', metrics(Job(precision="bf16", seed=1, steps=4, name="bf16_0"), 3.0, 1.0)])
def test_a_training_that_was_broken_off_starts_anew(left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job(precision="bf16", seed=1, steps=8, name="bf16_0")
    path = tmp_path / job.name / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text(left)
    assert not complete(job, options(tmp_path))
    monkeypatch.setattr(compare_precisions, "command", lambda job, options: [sys.executable, "-c", "pass"])
    train(job, options(tmp_path), "")
    assert not path.exists()


def test_a_launcher_is_asked_to_end_so_that_it_can_end_its_processes(tmp_path: Path):
    left = tmp_path / "asked"
    text = f"import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (open({str(left)!r}, 'w'), sys.exit(0)))"
    running = subprocess.Popen([sys.executable, "-S", "-c", f"{text}; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.readline()
    compare_precisions.stop(running)
    assert left.exists()


def test_runs_of_several_processes_take_as_many_cards_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,6,7,8")
    assert compare_precisions.cards(2) == ["2,5", "6,7"]
    with pytest.raises(ValueError, match="--processes 6: 5 GPUs are visible; give at most as many"):
        compare_precisions.cards(6)
    job = compare_precisions.job_of("O2", 1, 8, 2)
    words = command(job, options(tmp_path, "--global-batch-size 8"))
    assert words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert list(schedule(parse_args(words[8:]), 2)) == []


def test_every_visible_card_takes_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert compare_precisions.cards() == ["2", "5"]

    def note(job: Job, options: argparse.Namespace) -> list[str]:
        write = f"open({str(tmp_path / job.name)!r} + '.card', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
        return [sys.executable, "-c", f"import os, time; {write}; time.sleep(1)"]

    monkeypatch.setattr(compare_precisions, "command", note)
    jobs = [Job(precision="bf16", seed=seed, steps=8, name=f"bf16_{seed}") for seed in range(4)]
    compare_precisions.train_all(jobs, options(tmp_path), at_once=2)
    assert sorted(file.read_text() for file in tmp_path.glob("*.card")) == ["2", "2", "5", "5"]
