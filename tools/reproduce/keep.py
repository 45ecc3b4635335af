"""The rows of an entry: a CSV that holds each piece as soon as it was run, so that a run that was cut off goes on."""

import csv
import fcntl
import functools
import io
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from megatron.lm.shell.durable import written_aside
from tools.bench import rows
from tools.reproduce.entry import Entry, Finding, Task
from tools.reproduce.texts import OWN_TEXT

RESULTS = "tools/reproduce/results/entries"
PLACE = ("date", "commit", "gpu", "driver", "torch")
COLUMNS = ("size", "piece", "quantity", "x", "ours", "paper", "unit", "seed", "command", "seconds", *PLACE)
Row = Mapping[str, str]


def read(file: Path) -> list[Row]:
    """The rows of a file; none where there is no file.

    Raises:
        ValueError: it has other columns.
    """
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        found: list[Row] = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{file} has other columns than {', '.join(COLUMNS)}: it is no file of tools.reproduce; move it away")
    return found


def write(file: Path, found: Sequence[Row]) -> None:
    """All rows, in one go: a kill leaves the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    with written_aside(file) as stream:
        stream.write(text.getvalue().encode())


def missing(entry: Entry, size: str, found: Iterable[Row]) -> list[str]:
    """The pieces of a size that have no row."""
    there = {row["piece"] for row in found if row["size"] == size}
    return [piece for piece in entry.pieces(size) if piece not in there]


def shown(value: float | str | None) -> str:
    """A value as the file has it: six digits of a number."""
    return "" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def run(
    entry: Entry,
    size: str,
    text: Path,
    folder: Path,
    commit: str | None,
    again: bool,
    pieces: Sequence[str] = (),
    at_once: int = 1,
) -> Iterator[tuple[str, list[Row]]]:
    """Run the pieces that are missing, of `again` all, and keep each; (piece, its rows) as they come.

    Args:
        entry: what to run; its CSV lies in `folder`.
        size: a key of its sizes.
        text: see `Task`.
        folder: of the CSV, and of files that are kept from piece to piece, in a folder of their own.
        commit: hash to record where the tree is not a git checkout.
        again: forget the rows of this size, and the files that were kept; with `pieces` their rows alone, and no file.
        pieces: these of the size alone; none named: all.
        at_once: pieces that run beside each other, for those that spend their time in processes of their own.

    Raises:
        ValueError: the size has no such piece, or its pieces do not run beside each other.
    """
    unknown = [piece for piece in pieces if piece not in entry.pieces(size)]
    if unknown:
        raise ValueError(f"--pieces {unknown[0]!r}: size {size} of {entry.name} has {', '.join(map(repr, entry.pieces(size)))}")
    kept = folder / "kept" / entry.name
    if at_once > 1 and not entry.apart:
        raise ValueError(f"--at-once {at_once}: the pieces of {entry.name} share this process or the GPU that they time; give 1")
    if again and not pieces:
        shutil.rmtree(kept, ignore_errors=True)
    file = folder / f"{entry.name}.csv"
    forgotten = (pieces or entry.pieces(size)) if again else ()
    found = [row for row in read(file) if not (row["size"] == size and row["piece"] in forgotten)]
    read_text = ["--text", text.name] if text.name != OWN_TEXT else []
    command = shlex.join(["python", "-m", "tools.reproduce", entry.name, "--size", size, *read_text])
    wanted = [piece for piece in missing(entry, size, found) if not pieces or piece in pieces]
    tasks = [Task(size, piece, text, kept, commit) for piece in wanted]
    for task, fresh in _outcomes(functools.partial(_rows_of, entry, command), tasks, at_once):
        _add(file, size, {*forgotten, task.piece}, fresh)
        forgotten = ()
        yield task.piece, fresh


def _add(file: Path, size: str, instead: Collection[str], fresh: Sequence[Row]) -> None:
    """Rows in place of those of these pieces, beside what another call has written meanwhile."""
    lock = file.parent / "kept" / f"{file.stem}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write(file, [*(row for row in read(file) if row["size"] != size or row["piece"] not in instead), *fresh])


def _outcomes(run: Callable[[Task], list[Row]], tasks: Sequence[Task], at_once: int) -> Iterator[tuple[Task, list[Row]]]:
    """What tasks come to, as they come to it. Where one fails, no other begins, and those that have begun come before its error."""
    if at_once == 1:
        yield from ((task, run(task)) for task in tasks)
        return
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(run, task): task for task in tasks}
        failed: BaseException | None = None
        try:
            for done in as_completed(running):
                if done.cancelled():
                    continue
                if (error := done.exception()) is None:
                    yield running[done], done.result()
                elif failed is None:
                    failed = error
                    pool.shutdown(wait=False, cancel_futures=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if failed is not None:
        raise failed


def _rows_of(entry: Entry, command: str, task: Task) -> list[Row]:
    start = time.perf_counter()
    findings = list(entry.run(task))
    if not findings:
        raise ValueError(f"{entry.name}, piece {task.piece}, found nothing: its function has to give a finding")
    common = {"size": task.size, "piece": task.piece, "command": command, "seconds": f"{time.perf_counter() - start:.1f}"}
    return [row_of(finding, common | rows.machine(task.commit)) for finding in findings]


def row_of(finding: Finding, common: Mapping[str, Any]) -> Row:
    """A line of the file."""
    values = {"quantity": finding.quantity, "unit": finding.unit, "seed": "" if finding.seed is None else str(finding.seed)}
    values |= {"x": shown(finding.x), "ours": shown(finding.ours), "paper": shown(finding.paper)}
    elsewhere = any(name in finding.where for name in PLACE)
    measured = {name: finding.where.get(name, "") for name in PLACE} if elsewhere else {}  # never part of it there and part here
    return {name: {**common, **values, **measured}[name] for name in COLUMNS}
