"""The batch script for Slurm among commands that stand in for Slurm's: what it starts, and what it does about exit codes and limits."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import tiny

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "pretrain.sh"
LAUNCH = "examples/gpt3/pretrain_gpt_125m.sh"
TASKS = 2

# One task a GPU on one machine. Tasks are told where they are as Slurm tells them; their numbers stand in a file, for scancel.
SRUN = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path
here = Path(os.environ["FAKE"])
options = [word for word in sys.argv[1:] if word.startswith("--")][:2]
assert options == ["--kill-on-bad-exit=0", "--wait=300"], sys.argv
command = sys.argv[3:]
count = len(list(here.glob("step*")))
tasks = []
for task in range({TASKS}):
    place = {{"SLURM_STEP_ID": count, "SLURM_NTASKS": {TASKS}, "SLURM_NNODES": 1, "SLURM_NODEID": 0}}
    place |= {{"SLURM_PROCID": task, "SLURM_LOCALID": task}}
    tasks.append(subprocess.Popen(command, env=os.environ | {{name: str(value) for name, value in place.items()}}))
(here / f"step{{count}}").write_text(json.dumps([task.pid for task in tasks]))
sys.exit(max(code if (code := task.wait()) >= 0 else 128 - code for task in tasks))
"""
SCANCEL = f"""#!{sys.executable}
import json, os, signal, sys
from pathlib import Path
assert sys.argv[1:] == ["--signal=TERM", "77"], sys.argv
newest = max(Path(os.environ["FAKE"]).glob("step*"), key=lambda file: int(file.name[4:]))
for pid in json.loads(newest.read_text()):
    os.kill(pid, signal.SIGTERM)
"""
SCONTROL = """#!/bin/bash
case "$*" in
  "show hostnames localhost") echo localhost ;;
  "requeue 77") touch "$FAKE/requeued" ;;
  *) exit 1 ;;
esac
"""
# Stands where the interpreter would: does for each process of a module what the test has put down for it, a line of shell.
PYTHON = """#!/bin/bash
if [ "$1" != -m ]; then exit 0; fi
case "$2" in
  *check_cluster) name=check ;;
  *) name=train ;;
esac
[ "$RANK" = 0 ] || trap '' TERM # it has nothing to do, and ends by itself
printf '%s %s\\n' "$name" "$*" >>"$FAKE/called"
echo "MASTER_PORT=$MASTER_PORT RANK=$RANK WORLD_SIZE=$WORLD_SIZE LOCAL_RANK=$LOCAL_RANK" >>"$FAKE/places"
if [ "$RANK" = 0 ]; then
  attempt=$(($(cat "$FAKE/$name.count" 2>/dev/null || echo 0) + 1))
  echo "$attempt" >"$FAKE/$name.count"
  if [ -f "$FAKE/$name.$attempt" ]; then source "$FAKE/$name.$attempt"; fi
fi
"""


class Slurm:
    """`sbatch`, which runs a copy of the script as Slurm does, tells it of the limit, and runs it again where it was requeued."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fake, self.save = folder, folder / "fake", folder / "save"
        self.fake.mkdir()
        for name, text in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL, "python": PYTHON}.items():
            (self.fake / name).write_text(text, encoding="utf-8")
            (self.fake / name).chmod(0o755)
        for name in ("corpus.bin", "corpus.idx", "encoder.json", "vocab.bpe"):
            (folder / name).write_bytes(b"")
        self.environment: dict[str, Any] = {
            "PYTHON": self.fake / "python",
            "DATA": folder / "corpus",
            "SAVE": self.save,
            "GPUS_PER_NODE": TASKS,
        }
        self.log = folder / "log"

    def does(self, name: str, *lines: str) -> None:
        """What rank 0 of the n-th check, or training, does."""
        for number, line in enumerate(lines, 1):
            (self.fake / f"{name}.{number}").write_text(line + "\n", encoding="utf-8")

    def trains(self, run: int = 0) -> bool:
        """Whether the first task of training is at work and the others have begun, in this run: a launch script dies of TERM."""
        return (self.fake / "trains").exists() and len(self.called("train")) == TASKS * (run + 1)

    def sbatch(self, *flags: str, limit: Callable[[int], bool] = lambda run: False, script: str = LAUNCH, runs: int = 5) -> list[int]:
        """Exit codes of the job's runs. limit: asked again and again with the run's number, whether its time limit is near."""
        directives = re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
        warned = any(re.fullmatch(r"--signal=B:USR1@\d+", word) for word in directives)
        spool = self.folder / "slurm_script"
        shutil.copy(SCRIPT, spool)
        kept = {name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH") if name in os.environ}
        slurm = {
            "SLURM_JOB_ID": 77,
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_SUBMIT_DIR": ROOT,
            "SLURM_CPUS_PER_TASK": 1,
            "FAKE": self.fake,
        }
        path = {"PATH": f"{self.fake}:{os.environ['PATH']}", "ON_CPU": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        codes: list[int] = []
        while not codes or ((self.fake / "requeued").exists() and "--requeue" in directives and len(codes) < runs):
            (self.fake / "requeued").unlink(missing_ok=True)
            environment = kept | path | {name: str(value) for name, value in (self.environment | slurm).items()}
            if codes:
                environment["SLURM_RESTART_COUNT"] = str(len(codes))
            with self.log.open("a") as log:  # --open-mode=append
                batch = subprocess.Popen(
                    ["bash", str(spool), script, *flags], env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
                )
            told, end = False, time.monotonic() + 300
            while batch.poll() is None:
                assert time.monotonic() < end, self.said()
                if warned and not told and limit(len(codes)):
                    os.kill(batch.pid, signal.SIGUSR1)  # B: the shell alone
                    told = True
                time.sleep(0.02)
            codes.append(batch.returncode)
        return codes

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def called(self, name: str) -> list[str]:
        """Calls of the check, or of training, by rank."""
        file = self.fake / "called"
        return [line for line in file.read_text().splitlines() if line.startswith(f"{name} ")] if file.exists() else []


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


MARK = 'mkdir -p "$SAVE"; echo {} >"$SAVE/latest_checkpointed_iteration.txt"; '
# As the trainer does: saves at SIGTERM and leaves with the code that it was given.
LEAVES = "trap '" + MARK + 'exit 75\' TERM; touch "$FAKE/trains"; while :; do sleep 0.02; done'


def test_it_can_be_submitted_as_it_stands():
    assert SCRIPT.stat().st_mode & stat.S_IXUSR
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.index("#SBATCH") < text.index("set -euo")  # Slurm reads none after the first command


@pytest.mark.promise("Clusters", "The Slurm script checks every GPU, then trains with one process per GPU.")
def test_every_gpu_is_checked_and_then_trains(slurm: Slurm):
    assert slurm.sbatch("--save-interval", "500") == [0], slurm.said()
    check, train = slurm.called("check"), slurm.called("train")
    assert len(check) == len(train) == TASKS
    assert all("megatron.lm.tools.check_cluster --hosts localhost" in line for line in check)
    assert all(f"--save {slurm.save} --load {slurm.save} --exit-code-unfinished 75 --save-interval 500" in line for line in train)
    places = (slurm.fake / "places").read_text().splitlines()
    assert sorted(line.partition(" ")[2] for line in places) == sorted(
        f"RANK={rank} WORLD_SIZE={TASKS} LOCAL_RANK={rank}" for rank in range(TASKS) for _ in range(2)
    )
    assert len({line.partition(" ")[0] for line in places}) == 2  # a port for each
    assert "training is finished" in slurm.said()


@pytest.mark.promise("Clusters", "A failed check starts no training.")
def test_a_check_that_fails_starts_nothing(slurm: Slurm):
    slurm.does("check", "echo 'error: rank 0 (localhost): wrong' >&2; exit 1")
    assert slurm.sbatch() == [1]
    assert slurm.called("train") == []
    assert (
        "the check of GPUs and links failed, training was not started: exclude the machine it names (sbatch --exclude=HOST)" in slurm.said()
    )


@pytest.mark.parametrize("code", [2, 75])
def test_a_refusal_or_a_cancelled_job_is_not_tried_again(slurm: Slurm, code: int):
    """scancel signals the steps, and the trainer leaves as at a time limit, with 75; nobody told this script of one."""
    slurm.does("train", f"exit {code}")
    assert slurm.sbatch() == [code]
    assert len(slurm.called("train")) == TASKS


def test_a_failure_is_tried_again_after_another_check(slurm: Slurm):
    slurm.does("train", MARK.format(20) + "exit 1", "kill -9 $$")
    assert slurm.sbatch() == [0]
    assert len(slurm.called("train")) == len(slurm.called("check")) == 3 * TASKS
    assert "attempt 1 of 3 ended with exit code 1; the newest checkpoint is of iteration 20" in slurm.said()
    assert "attempt 2 of 3 ended with exit code 137" in slurm.said()
    assert len(set(re.findall(r"MASTER_PORT=\d+", (slurm.fake / "places").read_text()))) == 6


def test_attempts_come_to_an_end(slurm: Slurm):
    slurm.environment["ATTEMPTS"] = 2
    slurm.does("train", "exit 1", "exit 1")
    assert slurm.sbatch() == [1]
    assert len(slurm.called("train")) == 2 * TASKS


@pytest.mark.promise("Clusters", "At the time limit all processes save and exit, the job is requeued and resumes.")
def test_at_the_limit_it_saves_and_is_requeued_and_the_same_line_goes_on(slurm: Slurm):
    slurm.does("train", LEAVES.format(120))
    assert slurm.sbatch("--lr", "1e-4", limit=lambda run: run == 0 and slurm.trains()) == [0, 0], slurm.said()
    said = slurm.said()
    assert "received SIGUSR1, the time limit is near: the processes save and exit" in said
    assert "requeued; the newest checkpoint is of iteration 120" in said
    assert said.count("training is finished") == 1
    train = slurm.called("train")
    assert len(train) == 2 * TASKS
    assert len(set(train)) == 1


def test_a_limit_during_the_check_requeues_a_run_that_has_a_checkpoint(slurm: Slurm):
    slurm.does("check", "trap '" + MARK.format(5) + 'exit 143\' TERM; touch "$FAKE/checks"; while :; do sleep 0.02; done')
    assert slurm.sbatch(limit=lambda run: run == 0 and (slurm.fake / "checks").exists()) == [0, 0], slurm.said()
    assert len(slurm.called("train")) == TASKS


@pytest.mark.promise("Clusters", "A job that saved nothing before its limit is not requeued.")
def test_a_limit_that_is_too_short_to_save_anything_ends_the_job(slurm: Slurm):
    slurm.does("train", "trap 'exit 75' TERM; touch \"$FAKE/trains\"; while :; do sleep 0.02; done")
    assert slurm.sbatch(limit=lambda run: slurm.trains()) == [2]
    assert "no checkpoint was written before the time limit (newest: none): give sbatch a longer --time" in slurm.said()


def test_training_that_ends_at_the_limit_is_not_requeued(slurm: Slurm):
    slurm.does("train", "trap 'exit 0' TERM; touch \"$FAKE/trains\"; while :; do sleep 0.02; done")
    assert slurm.sbatch(limit=lambda run: slurm.trains()) == [0]
    assert not (slurm.fake / "requeued").exists()


def test_requeues_come_to_an_end(slurm: Slurm):
    slurm.environment["REQUEUES"] = 1
    slurm.does("train", *(LEAVES.format(number) for number in (10, 20)))
    started = slurm.fake / "trains"

    def limit(run: int) -> bool:
        near = slurm.trains(run) and int((slurm.fake / "train.count").read_text()) == run + 1
        if near:
            started.unlink()
        return near

    assert slurm.sbatch(limit=limit) == [0, 2], slurm.said()
    assert "the job was requeued 1 times already (REQUEUES=1)" in slurm.said()


@pytest.mark.parametrize(
    ("environment", "script", "wanted"),
    [
        ({"SAVE": ""}, LAUNCH, "SAVE is not set: set it to the folder for checkpoints"),
        ({}, "no/such.sh", "the first argument, 'no/such.sh', is not a file: give a launch script"),
        ({"ATTEMPTS": "none"}, LAUNCH, "ATTEMPTS=none: give a whole number in [1, 1000]"),
        ({"REQUEUES": "-1"}, LAUNCH, "REQUEUES=-1: give a whole number in [0, 10000]"),
        ({"ROOT": "/nowhere"}, LAUNCH, "ROOT=/nowhere is not a checkout of this repository: submit from its root folder, or set ROOT"),
        ({"PYTHON": "/nowhere/python"}, LAUNCH, "PYTHON=/nowhere/python is not a program"),
    ],
)
def test_what_is_wrong_is_a_line(environment: dict[str, str], script: str, wanted: str, slurm: Slurm):
    slurm.environment |= environment
    assert slurm.sbatch(script=script) == [2]
    assert slurm.said().startswith(f"error: {wanted}")
    assert slurm.said().count("\n") == 1


def test_outside_of_a_job_it_says_so():
    done = subprocess.run(["bash", str(SCRIPT)], cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: this is not a Slurm job: start it with sbatch\n")


@pytest.mark.nightly(120)
def test_a_real_run_is_stopped_by_the_limit_requeued_and_resumed(slurm: Slurm):
    metrics = slurm.folder / "metrics.jsonl"
    slurm.environment |= {"PYTHON": sys.executable, "DATA": tiny.write_data(slurm.folder, "real")}
    toy = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --tokenizer-type NullTokenizer "
        "--split 80,15,5 --micro-batch-size 2 --global-batch-size 4 --lr-warmup-iters 5 --eval-iters 0 --log-interval 1 --fp8-min-gain 0 "
        "--train-iters 300"
    )
    # No tokenizer of GPT-2 lies beside the data: the script then takes the one among the flags.
    for name in ("encoder.json", "vocab.bpe"):
        (slurm.folder / name).unlink()

    def rows() -> list[int]:
        lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row["iteration"] for row in found if row["kind"] == "train"]

    codes = slurm.sbatch(*toy.split(), "--metrics-file", str(metrics), limit=lambda run: run == 0 and len(rows()) > 20)
    said = slurm.said()
    assert codes == [0, 0], said[-5000:]
    assert said.count("processes on 1 machines: all is well") == 2
    assert re.search(r"leaving after iteration \d+, saved: SIGTERM", said)
    assert said.count("resumed from") == 1
    assert rows() == list(range(1, 301))
