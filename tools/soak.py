"""Kill small trainings at random moments, over and over, and check that nothing is ever lost.

    make soak            or: python tools/soak.py [--runs N] [--seed S]

A job saves every second iteration into the folder that it resumes from, and keeps the last two, or the last one. It builds the index
caches of its data itself. Every run of it is ended by SIGKILL of all its processes, at a random moment, in the middle of a save or while
the index caches are written, until N runs have been killed. Each run must resume from the newest complete checkpoint, and the final
checkpoint of a job must equal an undisturbed job's, bit for bit. Exits with 1 if not, and keeps the folder.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatron.lm.checkpoint.files.folder import check_files, iteration_folder, marked_iteration, read_info
from megatron.lm.checkpoint.files.storage import Stored
from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS, INTERVAL, KEPT = 24, 2, 2
VOCABULARY = 60
SAVE_SECONDS = 0.1  # roughly the time of a save: some kills come right after it
INDEX, INDEX_SECONDS = -1, 0.02  # INDEX_SECONDS: roughly the time to write the index caches
POLL_SECONDS = 0.001
STUCK_SECONDS = 600.0  # longer than any run takes

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --hidden-dropout 0.1 --attention-dropout 0.1"
TRAINING = f"--train-iters {ITERATIONS} --micro-batch-size 2 --global-batch-size 4 --lr 5e-3 --lr-warmup-iters 2 --eval-iters 0"
DATA = f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --split 1,0,0 --num-workers 0"


@dataclass(frozen=True)
class Job:
    """A training run: processes, optimization level, whether it saves in the background, and its --keep-last."""

    processes: int
    level: str
    background: bool
    kept: int = KEPT

    def __str__(self) -> str:
        shown = f"{self.level}, {self.processes} process{'es' * (self.processes > 1)}{', --async-save' * self.background}"
        return f"{shown}, --keep-last {self.kept}"


JOBS = [Job(1, "O2", False), Job(2, "O3", True), Job(1, "O2", True, 1), Job(2, "O3", False), Job(2, "O3", True, 1)]


@dataclass(frozen=True)
class Moment:
    """When to kill: `seconds` after the job has begun save number `saves` of this run, after the start if 0, or, if `INDEX`, after the
    first file of the index caches appears."""

    saves: int
    seconds: float


@dataclass
class Tally:
    """Counts of what has happened so far."""

    kills: int = 0
    in_a_save: int = 0
    in_an_index: int = 0
    first_starts: int = 0
    unfinished: int = 0
    resumed: int = 0
    passed_over: int = 0
    jobs: int = 0

    def summary(self) -> str:
        """Return the counts as one paragraph."""
        return (
            f"{self.kills} kills, {self.in_a_save} of them inside a save, {self.in_an_index} at the index caches, "
            f"{self.first_starts} before a job's first checkpoint; {self.resumed} runs resumed, {self.unfinished} of them next to a "
            f"checkpoint that a kill had left unfinished; {self.passed_over} published checkpoints were damaged and skipped; {self.jobs} "
            "jobs finished, all bit for bit equal to an undisturbed one"
        )


def command(job: Job, data: Path, folder: Path) -> list[str]:
    """Return the command that starts or restarts a job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes)]
    saving = f"--save-interval {INTERVAL} --keep-last {job.kept}{' --async-save' * job.background}"
    return [
        *(*torchrun, "-m", "megatron.lm.pretrain", "--opt-level", job.level, "--fp8-min-gain", "0", "--data-path", str(data)),
        *f"{MODEL} {TRAINING} {DATA} {saving}".split(),
        *("--save", str(folder), "--load", str(folder), "--data-cache-path", str(index_caches(folder))),
    ]


def index_caches(folder: Path) -> Path:
    """Return the folder in which the job that saves into `folder` keeps the index caches of its data."""
    return folder.with_name(f"{folder.name}-index")


def write_data(folder: Path) -> Path:
    """Write a dataset of random tokens and return its prefix."""
    draw = random.Random(0)
    texts = (" ".join(str(draw.randrange(VOCABULARY - 1)) for _ in range(40)) for _ in range(200))
    options = EncodeOptions(data=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=VOCABULARY)
    write_datasets((Document(texts={"text": text}, source_bytes=1) for text in texts), {"text": folder / "data"}, options, workers=0)
    return folder / "data"


def start(line: Sequence[str], log: Path) -> subprocess.Popen:
    """Start a job that writes into `log`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as stream:
        return subprocess.Popen(line, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)


def kill(process: subprocess.Popen) -> None:
    """Send SIGKILL to a process and all its descendants; return when they are gone."""
    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]  # each of torchrun's workers leads its own process group
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family)


def partials(folder: Path) -> dict[tuple[str, int], int]:
    """Return the unfinished checkpoints, by name and inode, with the time of their last change (ns since 1970)."""
    try:
        folders = [entry for entry in os.scandir(folder) if entry.name.endswith(".partial") and entry.is_dir()]
        return {(entry.name, entry.inode()): entry.stat().st_mtime_ns for entry in folders}
    except FileNotFoundError:  # the folder does not exist yet, or a checkpoint was published between two lines
        return {}


def reached(process: subprocess.Popen, folder: Path, moment: Moment | None) -> bool:
    """Wait for the moment (None: until the process ends); return False if the process ends first. RuntimeError if it never ends."""
    known, begun, started = set(partials(folder)), 0, time.monotonic()
    since, caches = started, index_caches(folder)
    while process.poll() is None:
        if moment is not None and moment.saves == INDEX and begun == 0 and caches.is_dir() and any(caches.iterdir()):
            begun, since = INDEX, time.monotonic()
        for new in partials(folder).keys() - known:
            known.add(new)
            if int(new[0][5:12]) > (marked_iteration(folder) or 0):  # else it is an old one that is being deleted
                begun += 1
                since = time.monotonic() if moment is not None and begun == moment.saves else since
        if moment is not None and (begun == INDEX or begun >= moment.saves >= 0) and time.monotonic() - since >= moment.seconds:
            return True
        if time.monotonic() - started > STUCK_SECONDS:
            raise RuntimeError(f"a run in {folder} has not finished within {STUCK_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    return False


def newest_whole(folder: Path) -> int | None:
    """Check the checkpoint that the marker names, byte by byte, and return its iteration; None if there is no marker yet.

    Raises:
        ValueError: that checkpoint is incomplete or damaged.
    """
    marked = marked_iteration(folder)
    if marked is not None:
        checkpoint = iteration_folder(folder, marked)
        check_files(checkpoint, read_info(checkpoint)["files"])
    return marked


def check_start(log: Path, expected: int | None) -> bool:
    """Return whether a run logged that it resumed; it may have been killed before it logged anything.

    Raises:
        RuntimeError: it started from another iteration than `expected` (None: from scratch).
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    resumed = re.search(r"resumed from .* at iteration (\d+)", text)
    began = int(resumed[1]) if resumed else None
    if began != expected and (resumed or "training starts from scratch" in text):
        raise RuntimeError(f"a run started at iteration {began}, but the newest complete checkpoint was at iteration {expected}; see {log}")
    return resumed is not None


def differences(first: Path, second: Path) -> list[str]:
    """Return the keys of the tensors that are not bit for bit equal in two checkpoints."""
    one, other = Stored(first), Stored(second)

    def bits(stored: Stored, key: str) -> torch.Tensor:
        return stored.tensor(key).reshape(-1).view(torch.uint8)

    both = one.tensors.keys() & other.tensors.keys()
    return sorted((one.tensors.keys() ^ other.tensors.keys()) | {key for key in both if not torch.equal(bits(one, key), bits(other, key))})


def finish(job: Job, data: Path, folder: Path, moments: Sequence[Moment], tally: Tally) -> float:
    """Start a job until it finishes, and kill its first runs at the `moments`; return the seconds of the last run.

    Raises:
        RuntimeError: a run failed by itself, never ended, or started from the wrong iteration.
        ValueError: a kill has damaged the newest checkpoint.
    """
    expected: int | None = None
    for number, moment in enumerate([*moments, None]):
        log, before, started = folder.with_name(f"{folder.name}.{number}.log"), partials(folder), time.time()
        process = start(command(job, data, folder), log)
        try:
            killed = reached(process, folder, moment)
        finally:
            kill(process)
        if not killed and process.returncode:
            raise RuntimeError(f"a run of {job} left with exit code {process.returncode}; see {log}")
        resumed = check_start(log, expected)
        tally.resumed += resumed
        tally.unfinished += resumed and bool(before)
        tally.passed_over += log.read_text(encoding="utf-8", errors="replace").count("passed over: ")
        if not killed:
            break
        tally.kills += 1
        tally.in_a_save += any(changed > 1e9 * started for changed in partials(folder).values())
        before_it, expected = expected, newest_whole(folder)
        if (expected or 0) < (before_it or 0):
            raise RuntimeError(f"{folder} contained a complete checkpoint of iteration {before_it}; after a kill the newest is {expected}")
        tally.first_starts += expected is None
        tally.in_an_index += moment is not None and moment.saves == INDEX
    tally.jobs += 1
    return time.time() - started


def check_end(folder: Path, reference: Path, kept: int = KEPT) -> None:
    """Raise a RuntimeError unless a finished job left exactly its last `kept` checkpoints, the newest equal to an undisturbed job's."""
    expected = {iteration_folder(folder, ITERATIONS - INTERVAL * back).name for back in range(kept)}
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    if names != expected or newest_whole(folder) != ITERATIONS:
        raise RuntimeError(f"{folder} contains {', '.join(sorted(names))}; expected {', '.join(sorted(expected))}")
    different = differences(iteration_folder(reference, ITERATIONS), iteration_folder(folder, ITERATIONS))
    if different:
        raise RuntimeError(f"{folder} differs from the undisturbed {reference} in {len(different)} tensors, such as {different[0]}")


def draw_moment(draw: random.Random, seconds: float, *, first: bool = False) -> Moment:
    """Draw a moment: half of them anywhere in a run of `seconds`, half during or right after one of its first saves. If `first`, half fall
    into the time when the job writes the index caches."""
    if first and draw.random() < 0.5:
        return Moment(INDEX, draw.uniform(0, INDEX_SECONDS))
    if draw.random() < 0.5:
        return Moment(0, draw.uniform(0, seconds))
    return Moment(draw.randint(1, 4), draw.uniform(0, SAVE_SECONDS))


def soak(runs: int, seed: int, folder: Path) -> Tally:
    """Run the jobs in turn until `runs` runs have been killed.

    Raises:
        RuntimeError, ValueError: something was lost.
    """
    data, draw, tally = write_data(folder), random.Random(seed), Tally()
    undisturbed = {processes: folder / f"undisturbed-{processes}" for processes in (1, 2)}
    length = {job.processes: finish(job, data, undisturbed[job.processes], [], Tally()) for job in JOBS if not job.background}
    while tally.kills < runs:
        job, here = JOBS[tally.jobs % len(JOBS)], folder / f"job-{tally.jobs}"
        kills = min(runs - tally.kills, draw.randint(2, 6))
        moments = [draw_moment(draw, length[job.processes], first=number == 0) for number in range(kills)]
        finish(job, data, here, moments, tally)
        check_end(here, undisturbed[job.processes], job.kept)
        print(f"{here.name} ({job}): {tally.kills} kills so far, {tally.in_a_save} inside a save", flush=True)
        shutil.rmtree(here)
        shutil.rmtree(index_caches(here))
    return tally


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if something was lost, else the exit codes of `megatron.lm.shell.exit_codes`."""
    parser = Parser(description=__doc__)
    parser.add_argument("--runs", type=count(1), default=100, help="runs to kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments (default: %(default)s)")
    args = parser.parse_args(argv)
    folder, started = Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    try:
        tally = soak(args.runs, args.seed, folder)
    except (RuntimeError, ValueError) as error:
        print(f"FAILED: {error}\n{folder} is kept", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    print(f"{tally.summary()} ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
