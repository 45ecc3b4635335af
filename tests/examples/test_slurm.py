"""The batch script for Slurm with stand-ins for srun, scancel and scontrol that run one task on this machine.

They behave as slurm-wlm 22.05.8 did on two nodes of one host, where every ending below was seen on 2026-11-29. Slurm sends the limit's
SIGUSR1 to the script alone, and SIGTERM at the start of a GraceTime to the tasks alone; when it ends a job it sends SIGTERM to both."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "pretrain.sh"
COMMANDS = {
    "srun": 'echo $$ >"$FAKE/task"; echo "srun $@"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scancel": 'kill -TERM "$(cat "$FAKE/task")"',
    "scontrol": 'case $1$2 in requeue*) touch "$FAKE/requeued" ;; showjob) echo "$RECORD" ;; *) echo localhost ;; esac',
    "apptainer": 'echo "apptainer $@"; exec "${@:8}"',
}
SAVES = 'mkdir -p "$SAVE"; echo 20 >"$SAVE/latest_checkpointed_iteration.txt"; exit 75'
SLOWLY = f"trap : TERM; sleep 1; {SAVES}"
UNTIL_THE_LIMIT = "trap '{}' TERM; touch \"$FAKE/trains\"; while :; do sleep 0.02; done"


def submit(folder: Path, training: str, *signals: tuple[str, int], **environment: object) -> tuple[int, str, int]:
    """Run the script as a Slurm job whose tasks run `training`, lines of shell. `signals` are sent while it trains: to the "script" or the
    "task". Returns the exit code, the output, and how often training was started."""
    for name, line in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    launch = folder / "launch.sh"
    launch.write_text(f'echo "$@" >>"$FAKE/started"\n{training}\n', encoding="utf-8")
    job = {"SLURM_JOB_ID": 77, "SLURM_JOB_NODELIST": "localhost", "SLURM_SUBMIT_DIR": ROOT, "FAKE": folder, "SAVE": folder / "save"}
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable}
    words = {name: str(value) for name, value in (own | job | environment).items()}
    command = ["bash", str(SCRIPT), str(launch), "--lr", "1e-4"]
    batch = subprocess.Popen(command, env=words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 60
    while signals and not (folder / "trains").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    for receiver, number in signals:
        os.kill(batch.pid if receiver == "script" else int((folder / "task").read_text()), number)
        time.sleep(0.1)  # so that the script's trap has run before the next
    output, _ = batch.communicate(timeout=120)
    started = folder / "started"
    return batch.returncode, output, started.read_text().count("\n") if started.exists() else 0


PREEMPTED = "JobState=RUNNING PreemptTime=2026-11-29T17:07:39"


@pytest.mark.parametrize(("code", "starts", "record"), [(0, 1, ""), (1, 2, PREEMPTED), (2, 1, PREEMPTED), (75, 1, "")])
def test_only_failures_are_retried(tmp_path: Path, code: int, starts: int, record: str):
    """Not invalid flags (2), nor a run that was asked to stop (75). A preemption does not make them reasons to requeue."""
    assert submit(tmp_path, f"exit {code}", ATTEMPTS=2, RECORD=record)[::2] == (code, starts)
    assert not (tmp_path / "requeued").exists()
    assert f"--save {tmp_path}/save --load {tmp_path}/save --exit-code-unfinished 75 --lr 1e-4" in (tmp_path / "started").read_text()


LIMIT, GRACE, ENDS = [("script", signal.SIGUSR1)], [("task", signal.SIGTERM)], [("script", signal.SIGTERM), ("task", signal.SIGTERM)]


@pytest.mark.promise("Clusters", "At the time limit all processes save and exit, and the job is requeued, unless it saved nothing.")
@pytest.mark.parametrize(
    ("signals", "record", "ending", "code"),
    [
        *[(LIMIT, "PreemptTime=None", SAVES, 0), (LIMIT, "", "exit 75", 2)],
        (LIMIT + ENDS, "JobState=COMPLETING Reason=TimeLimit", SLOWLY, 0),
        *[(GRACE, PREEMPTED, SAVES, 0), (GRACE, PREEMPTED, "exit 143", 0)],
        *[(ENDS, "PreemptTime=None", SAVES, 75), (LIMIT + ENDS, "", SLOWLY, 75), (GRACE + ENDS, PREEMPTED, SLOWLY, 75)],
        (ENDS, "", "exit 143", 143),
    ],
    ids=[
        *["saved", "nothing saved", "saved after the limit", "preempted", "preempted before it saved"],
        *["scancel", "scancel at the limit", "scancel when preempted", "a failed machine, which Slurm requeues"],
    ],
)
def test_a_job_that_saved_at_its_limit_or_when_preempted_is_requeued(tmp_path: Path, signals, record, ending, code):
    result, _, starts = submit(tmp_path, UNTIL_THE_LIMIT.format(ending), *signals, RECORD=record)
    assert (result, starts) == (code, 1)
    assert (tmp_path / "requeued").exists() == (code == 0)


def test_restarts_without_a_newer_checkpoint_are_counted(tmp_path: Path):
    """Also those that Slurm makes of itself, such as after a preemption without a GraceTime."""

    def again(count: int) -> int:
        return submit(tmp_path, "exit 143", ATTEMPTS=1, REQUEUES=1, SLURM_RESTART_COUNT=count)[0]

    assert [again(count) for count in (0, 1, 2)] == [143, 143, 2]
    (tmp_path / "save/latest_checkpointed_iteration.txt").write_text("20\n")
    assert [again(count) for count in (500, 501, 502)] == [143, 143, 2]
    assert submit(tmp_path, "exit 143", ATTEMPTS=1, REQUEUES=1, SLURM_JOB_ID=78)[0] == 143  # submitted again


@pytest.mark.parametrize(
    ("image", "line"), [("image.sif", "apptainer exec --nv --pwd"), ("nvcr.io/x", "--container-image=nvcr.io/x --cont")]
)
def test_tasks_run_in_an_image(tmp_path: Path, image: str, line: str):
    code, output, _ = submit(tmp_path, 'echo "port $MASTER_PORT"', IMAGE=image)
    assert (code, line in output) == (0, True)
    assert 20000 <= int(output.partition("port ")[2].split()[0]) < 32768


@pytest.mark.parametrize(
    "environment", [{"SAVE": ""}, {"ATTEMPTS": "none"}, {"REQUEUES": "-1"}, {"ROOT": "/nowhere"}, {"PYTHON": "/nowhere/python"}], ids=str
)
def test_invalid_variables_are_refused_in_one_line(tmp_path: Path, environment: dict[str, str]):
    code, output, starts = submit(tmp_path, "exit 0", **environment)
    assert (code, output.count("\n"), starts) == (2, 1, 0)
    assert next(iter(environment)) in output
