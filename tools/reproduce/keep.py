"""Store the results of an entry in a CSV, piece by piece as they are run, so that an interrupted run resumes."""

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

from megatron.lm.evaluation.paired_difference import ABOVE, BELOW, HOLDS, NOT_SHOWN, PER_TOKEN, PairedDifference, paired_difference
from megatron.lm.shell.files import written_aside
from tools.bench.rows import machine
from tools.reproduce.entry import BY_LOSSES, Entry, Finding, Task
from tools.reproduce.texts import OWN_TEXT

RESULTS = "tools/reproduce/results/entries"
PLACE = ("date", "commit", "gpu", "driver", "torch")
COLUMNS = ("size", "piece", "quantity", "x", "ours", "paper", "unit", "seed", "command", "seconds", *PLACE)
Row = Mapping[str, str]


def read(file: Path) -> list[Row]:
    """Read the rows of a file; a missing file reads as empty.

    Raises:
        ValueError: it has other columns.
    """
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        rows: list[Row] = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{file} is not a results file of tools.reproduce: its columns are not {', '.join(COLUMNS)}; move it away")
    return rows


def write(file: Path, rows: Sequence[Row]) -> None:
    """Write all rows atomically: a kill leaves the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with written_aside(file) as stream:
        stream.write(text.getvalue().encode())


def missing(entry: Entry, size: str, rows: Iterable[Row]) -> list[str]:
    """Return the pieces of a size that have no row."""
    done = {row["piece"] for row in rows if row["size"] == size}
    return [piece for piece in entry.pieces_of(size) if piece not in done]


def largest(entry: Entry, rows: Iterable[Row]) -> tuple[str, list[Row]]:
    """Return the largest size of an entry that has results, and its rows; ("", []) without results."""
    by_size: dict[str, list[Row]] = {}
    for row in rows:
        by_size.setdefault(row["size"], []).append(row)
    size = next((size for size in reversed(list(entry.sizes)) if size in by_size), "")
    return size, by_size.get(size, [])


def loss_differences(one: Entry, rows: Sequence[Row]) -> list[tuple[str, str, PairedDifference]]:
    """Return (baseline, other, paired difference) for each pair of `Entry.same_loss` with common seeds in the rows."""
    losses: dict[str, dict[str, float]] = {}
    units = {row["quantity"]: row["unit"] or PER_TOKEN for row in rows}
    for row in rows:
        if not row["x"] and any(row["quantity"] in pair for pair in one.same_loss):
            losses.setdefault(row["quantity"], {})[row["seed"]] = float(row["ours"])
    differences = []
    for base, other in one.same_loss:
        common = {seed: loss for seed, loss in losses.get(other, {}).items() if seed in losses.get(base, {})}
        if common:
            differences.append((base, other, paired_difference(losses[base], common, units[base])))
    return differences


def verdict(one: Entry, rows: Sequence[Row]) -> str:
    """Return the verdict of an entry: as written, or `BY_LOSSES`, which follows from the pairs of `same_loss`: one for each baseline."""
    if one.verdict != BY_LOSSES:
        return one.verdict
    judged: dict[str, set[str]] = {}
    for base, _, difference in loss_differences(one, rows):
        judged.setdefault(run_of(base).partition(" at ")[2], set()).add(difference.verdict())
    words = {
        where: "does not hold" if seen & {ABOVE, BELOW} else HOLDS if seen == {HOLDS} else "holds in part" if HOLDS in seen else NOT_SHOWN
        for where, seen in judged.items()
    }
    return "; ".join(f"{where}: {word}" for where, word in words.items()) if len(words) > 1 else next(iter(words.values()), NOT_SHOWN)


def loss_sentences(one: Entry, rows: Sequence[Row]) -> list[str]:
    """Return a sentence on each pair of losses (`PairedDifference.sentence`), which says how many pairs are of runs of two commits; a last
    one says for how many there is no curve."""
    sentences, lacking = [], 0
    for base, other, paired in loss_differences(one, rows):
        trees = [{row["seed"]: row["commit"] for row in rows if row["quantity"] == name} for name in (base, other)]
        mixed = sum(trees[0][str(seed)] != trees[1][str(seed)] for seed in paired.seeds)
        remark = f"; {mixed} of {len(paired.seeds)} pairs compare runs of two commits" if mixed else ""
        course = curve(run_of(base), rows)
        lacking += not course
        sentences.append(paired.sentence(run_of(base), run_of(other), curve=course) + remark)
    if lacking:
        sentences.append(f"For {lacking} of {len(sentences)} no held-out losses by step are on file, so the cost in tokens is not known")
    return sentences


def curve(run: str, rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return (x, loss) of all seeds of a run, of "bf16 at 125M, all levels" that of "bf16, 125M", if it has none: held out, or else of
    training, whose loss falls faster on text that is read repeatedly."""
    parts = run.replace(" at ", ", ").split(", ")
    for name in (", ".join(parts[:length]) + f", {kind} loss" for kind in ("held-out", "training") for length in range(len(parts), 0, -1)):
        if points := [(float(row["x"]), float(row["ours"])) for row in rows if row["x"] and row["quantity"].startswith(name)]:
            return points
    return []


def run_of(quantity: str) -> str:
    """Return the name of a run: the quantity of its loss without the words "validation loss"."""
    return quantity.removesuffix("validation loss").rstrip(" :,")


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
    """Run the missing pieces, or all with `again`, and store each; yield (piece, its rows) as they finish.

    Args:
        entry: what to run; its CSV is in `folder`.
        size: a key of its sizes.
        text: see `Task`.
        folder: folder of the CSV, with a subfolder for files that are cached between pieces.
        commit: hash to record if the tree is not a git checkout.
        again: discard the rows of this size and the cached files; with `pieces`, only the rows of those pieces.
        pieces: pieces of the size to run; empty for all.
        at_once: pieces that run at the same time, for entries whose pieces run in their own processes.

    Raises:
        ValueError: the size has no such piece, or its pieces cannot run at the same time.
    """
    unknown = [piece for piece in pieces if piece not in entry.pieces_of(size)]
    if unknown:
        raise ValueError(f"--pieces {unknown[0]!r}: size {size} of {entry.name} has {', '.join(map(repr, entry.pieces_of(size)))}")
    kept = folder / "kept" / entry.name
    if at_once > 1 and not entry.apart:
        raise ValueError(f"--at-once {at_once}: the pieces of {entry.name} share this process or the GPU that they time; give 1")
    if again and not pieces:
        shutil.rmtree(kept, ignore_errors=True)
    file = folder / f"{entry.name}.csv"
    forgotten = (pieces or entry.pieces_of(size)) if again else ()
    earlier = [row for row in read(file) if not (row["size"] == size and row["piece"] in forgotten)]
    read_text = ["--text", text.name] if text.name != OWN_TEXT else []
    command = shlex.join(["python", "-m", "tools.reproduce", entry.name, "--size", size, *read_text])
    remaining = [piece for piece in missing(entry, size, earlier) if not pieces or piece in pieces]
    tasks = [Task(size, piece, text, kept, commit) for piece in remaining]
    for task, fresh in _outcomes(functools.partial(_rows_of, entry, command), tasks, at_once):
        _add(file, size, {*forgotten, task.piece}, fresh)
        forgotten = ()
        yield task.piece, fresh


def outdated(entry: Entry, size: str, rows: Sequence[Row], folder: Path, commit: str | None = None) -> dict[str, list[Row]]:
    """Recompute a size whose results are `computed`, and return the rows of each piece whose values or sources are no longer those on file;
    none for a piece on file that the entry no longer has.

    Args:
        entry: an entry with results of this size.
        size: a size that `Needs.computed` names.
        rows: the rows on file.
        folder: see `Task`.
        commit: hash to record if the tree is not a git checkout.
    """
    changed: dict[str, list[Row]] = {row["piece"]: [] for row in rows if row["size"] == size and row["piece"] not in entry.pieces_of(size)}
    for piece in entry.pieces_of(size):
        on_file = [row for row in rows if (row["size"], row["piece"]) == (size, piece)]
        findings = list(entry.findings(Task(size, piece, Path(), folder, commit)))
        if len(findings) == len(on_file) and all(_same(finding, row) for finding, row in zip(findings, on_file, strict=True)):
            continue
        command = shlex.join(["python", "-m", "tools.reproduce", entry.name, "--size", size])
        common = {"size": size, "piece": piece, "command": command, "seconds": "0.0"} | machine(commit)
        changed[piece] = [row_of(finding, common) for finding in findings]
    return changed


def _same(finding: Finding, row: Row) -> bool:
    """Return whether a row on file has a finding's values, and is of its source if it was measured elsewhere."""
    ours = row_of(finding, dict.fromkeys(("size", "piece", "command", "seconds", *PLACE), ""))
    columns = [name for name in ("quantity", "x", "ours", "paper", "unit", "seed", *PLACE) if name not in PLACE or ours[name]]
    return all(row[name] == ours[name] for name in columns)


def recompute(entry: Entry, folder: Path, commit: str | None = None) -> list[str]:
    """Replace results on file that are `computed` and have changed; return their sizes and pieces."""
    file, changes = folder / f"{entry.name}.csv", []
    for size in (size for size, needs in entry.sizes.items() if needs.computed):
        rows = read(file)
        if any(row["size"] == size for row in rows):
            for piece, fresh in outdated(entry, size, rows, folder / "kept" / entry.name, commit).items():
                _add(file, size, {piece}, fresh)
                changes.append(f"{size}, {piece}")
    return changes


def _add(file: Path, size: str, instead: Collection[str], fresh: Sequence[Row]) -> None:
    """Replace the rows of these pieces; keep what another call has written meanwhile."""
    lock = file.parent / "kept" / f"{file.stem}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write(file, [*(row for row in read(file) if row["size"] != size or row["piece"] not in instead), *fresh])


def _outcomes(run: Callable[[Task], list[Row]], tasks: Sequence[Task], at_once: int) -> Iterator[tuple[Task, list[Row]]]:
    """Yield tasks with their rows as they finish. If one fails, no other starts, and those that have started finish before its error."""
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
    findings = list(entry.findings(task))
    if not findings:
        raise ValueError(f"{entry.name}, piece {task.piece}, has no results: its function must return at least one finding")
    common = {"size": task.size, "piece": task.piece, "command": command, "seconds": f"{time.perf_counter() - start:.1f}"}
    return [row_of(finding, common | machine(task.commit)) for finding in findings]


def row_of(finding: Finding, common: Mapping[str, Any]) -> Row:
    """Return a finding as a line of the file."""
    values = {"quantity": finding.quantity, "unit": finding.unit, "seed": "" if finding.seed is None else str(finding.seed)}
    elsewhere = any(name in finding.where for name in PLACE)
    digits = 9 if elsewhere else 6  # tables of results from elsewhere must print the same distances and costs
    for key, value in (("x", finding.x), ("ours", finding.ours), ("paper", finding.paper)):
        values[key] = "" if value is None else value if isinstance(value, str) else f"{value:.{digits}g}"
    # all of it from that result, or all from this machine
    measured = {name: finding.where.get(name, "") for name in PLACE} if elsewhere else {}
    return {name: {**common, **values, **measured}[name] for name in COLUMNS}
