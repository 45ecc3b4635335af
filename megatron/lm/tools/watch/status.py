"""Say in words what a run is doing: not started, starting, running, silent, killed, stopped, failed or completed.

The trainer's first entry in the metrics file names its process and its last entry says how it ended. A process that is gone without a last
entry was killed. From another machine only the silence can be seen, and is reported as that.
"""

import itertools
import socket
import statistics
from collections.abc import Callable
from typing import NamedTuple

import psutil

from megatron.lm.run.reports.log_line import duration
from megatron.lm.tools.watch.run_files import WatchedRun

PATIENCE = 60.0  # seconds without a line that are never called silence
INTERVALS = 5  # usual times between lines, likewise

STYLES = {
    "not started": "dim",
    "starting": "cyan",
    "running": "green",
    "silent": "yellow",
    "killed": "bold red",
    "stopped": "yellow",
    "failed": "bold red",
    "completed": "bold green",
}


class Status(NamedTuple):
    """What a run is doing.

    Attributes:
        word: one of `STYLES`.
        text: the sentence to show, with the word.
    """

    word: str
    text: str


def status(run: WatchedRun, now: float, alive: Callable[[int, float], bool] | None = None, host: str | None = None) -> Status:
    """Return what `run` is doing at the time `now` (seconds since 1970).

    Args:
        alive: (process id, start of its run) -> whether that process exists on this machine.
        host: name of this machine.
    """
    if run.start is None:
        return Status("not started", "not started: its metrics file has no entry yet")
    resumed = f", resumed at iteration {run.start['start']}" if run.start.get("start") else ""
    at = f"iteration {run.train[-1]['iteration']}" if run.train else "iteration 0"
    total = run.start.get("iterations")
    of = f"{at} of {total}" if total else at
    if run.end is not None:
        why = f": {run.end['why']}" if run.end["why"] else ""
        word = run.end["status"] if run.end["status"] in STYLES else "stopped"
        return Status(word, f"{word} at iteration {run.end['iteration']}{f' of {total}' if total else ''}{why}{resumed}")
    silence = now - run.modified
    lacks_line = not run.train or run.train[-1]["iteration"] <= (run.start.get("start") or 0)
    usual = usual_seconds(run)
    if silence <= max(PATIENCE, INTERVALS * (usual or 0.0)):
        if lacks_line:
            return Status("starting", f"starting: it has not logged a step yet{resumed}")
        return Status("running", f"running at {of}{remaining(run)}{resumed}")
    process = run.start.get("pid")
    if process is None:
        doing = "it is from a version that recorded no end, so it may have completed"
    elif run.start.get("host") == (socket.gethostname() if host is None else host):
        if not (exists if alive is None else alive)(process, run.start.get("started") or now):
            return Status("killed", f"killed at {of}: process {process} is gone and wrote no end, {duration(silence)} ago{resumed}")
        doing = "it exists, and evaluates, saves, compiles or hangs"
    else:
        doing = "it evaluates, saves, hangs or was killed; only its own machine can tell"
    before = f", usually every {duration(usual)}" if usual else ""
    return Status("silent", f"silent for {duration(silence)} at {of}{before}: {doing}{resumed}")


def usual_seconds(run: WatchedRun) -> float | None:
    """Return the median time between the last training entries; None with fewer than two."""
    pairs = itertools.pairwise(run.train[-10:])
    times = [(b["iteration"] - a["iteration"]) * b["step_ms"] / 1e3 for a, b in pairs if b.get("step_ms") is not None]
    return statistics.median(times) if times else None


def remaining(run: WatchedRun) -> str:
    """Return `, 0:12:03 left`, or nothing if it is unknown; evaluations and checkpoints come on top."""
    total = (run.start or {}).get("iterations")
    last = run.train[-1] if run.train else {}
    if not total or last.get("step_ms") is None:
        return ""
    return f", {duration(max(0, total - last['iteration']) * last['step_ms'] / 1e3)} left without evaluations"


def exists(process: int, started: float) -> bool:
    """Return whether a process exists on this machine and is not a later one with the same number."""
    try:
        return psutil.Process(process).create_time() <= started + 1 and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # of another user
