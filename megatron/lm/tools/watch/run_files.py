"""Read metrics files and precision records while a run writes them.

`WatchedRun.update` reads only what was appended since the last call. A resumed run truncates its metrics file, and a run may be started
again in the same file, so training lines from the iteration of a new line on are dropped: the view shows the run as it is now.
"""

import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.lm.tools.inspect_scales import with_series
from megatron.lm.tools.report import is_number

BLOCK = 1 << 20
MOST_RUNS = 6
EVENTS = 5  # shown per run, the newest
NUMBERS = ("loss", "step_ms", "tokens_per_s", "memory_gib", "lr", "grad_norm", "grad_underflow", "skipped", "bits_per_byte")


class GrowingFile:
    """Complete lines of a file that another process appends to.

    Args:
        path: of the file; it may be missing.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._last = path, 0, b""

    def lines(self) -> tuple[bool, list[bytes]]:
        """Return whether the file was truncated or replaced, so that the lines are all of it, and the new complete lines.

        Raises:
            OSError: if it cannot be read; a missing file is empty.
        """
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            again, self._offset, self._last = self._offset > 0, 0, b""
            return again, []
        with stream:
            stream.seek(self._offset - len(self._last))
            again = stream.read(len(self._last)) != self._last
            if again:
                self._offset = 0
                stream.seek(0)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.splitlines(keepends=True)
        self._last = lines[-1] if lines else b"" if again else self._last
        return again, lines


@dataclass(kw_only=True)
class WatchedRun:
    """One metrics file, and the precision record next to it if there is one.

    Attributes:
        name: shown to people.
        metrics, record: files.
        unclear: why there is no `record`, if the reason is not that none is written.
        start: the first entry of the current start, None before it.
        starts: number of starts in the file.
        train, valid: entries by iteration.
        end: the last entry of the current start, if it has ended.
        events: sentences about spikes, skipped steps, rollbacks and the guard, newest last.
        unreadable: lines that are not entries.
        modified: time of the last write to the file, seconds since 1970; 0 if it is missing.
        step: the last recorded step with `series`, as `inspect_scales.read` returns it.
    """

    name: str
    metrics: Path
    record: Path | None = None
    unclear: str | None = None
    start: dict[str, Any] | None = None
    starts: int = 0
    train: list[dict[str, Any]] = field(default_factory=list)
    valid: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    events: deque[str] = field(default_factory=lambda: deque(maxlen=EVENTS))
    unreadable: int = 0
    modified: float = 0.0
    step: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._file = GrowingFile(self.metrics)

    def update(self) -> None:
        """Read what was written since the last call; OSError if a file cannot be read."""
        again, lines = self._file.lines()
        if again:
            self.start, self.starts, self.end, self.unreadable = None, 0, None, 0
            for entries in (self.train, self.valid, self.events):
                entries.clear()
        for line in lines:
            self._take(line)
        self.modified = self.metrics.stat().st_mtime if self.metrics.exists() else 0.0
        if self.record is not None:
            self.step = last_step(self.record) or self.step

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            entry = json.loads(line)
            kind = entry["kind"]
            if kind in ("train", "valid"):
                self._append(self.train if kind == "train" else self.valid, _judged(entry))
            elif kind == "precision":
                self.start, self.end, self.starts = entry, None, self.starts + 1
            elif kind == "end":
                self.end = {"status": str(entry["status"]), "iteration": int(entry["iteration"]), "why": entry["why"]}
            elif (event := sentence(entry)) is not None:
                self.events.append(event)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.unreadable += 1

    def _append(self, entries: list[dict[str, Any]], entry: dict[str, Any]) -> None:
        while entries and entries[-1]["iteration"] >= entry["iteration"]:
            entries.pop()
        entries.append(entry)

    def underflow(self) -> dict[str, dict[str, float]]:
        """Return {layer: {tensor: share of non-zero values that became zero}} of the last recorded step, FP8 linear layers only."""
        series = self.step["series"] if self.step is not None else {}
        layers = [layer for layer, tensor in series if tensor == "input"]
        shares: dict[str, dict[str, float]] = {layer: {} for layer in layers}
        for (layer, tensor), row in series.items():
            if layer in shares and row.get("underflow") is not None:
                shares[layer][tensor] = row["underflow"]
        return shares


def _judged(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with an iteration and numbers, of which some may be None; ValueError or KeyError if it has others."""
    if type(entry["iteration"]) is not int:
        raise ValueError(entry["iteration"])
    for name in NUMBERS:
        if entry.get(name) is not None and not is_number(entry[name]):
            raise ValueError(name)
    if "loss" not in entry:
        raise KeyError("loss")
    return entry


def sentence(entry: dict[str, Any]) -> str | None:
    """Return what an entry of another kind says, or None if it is not worth a line."""
    at = f"iteration {entry.get('iteration')}"
    if entry["kind"] == "spike":
        return f"{at}: loss {entry['loss']:.4g} is a spike over its mean of {entry['mean']:.4g}"
    if entry["kind"] == "skipped":
        return f"{at}: update skipped, a gradient was not finite"
    if entry["kind"] == "empty":
        return f"{at}: update skipped, the batch had no token to train on"
    if entry["kind"] == "rollback":
        return f"{at}: rolled back to iteration {entry['to']}"
    if entry["kind"] == "fp8_guard":
        return f"{at}: {entry['layer']} {'raised to BF16' if entry['raised'] else 'returned to FP8'} ({entry['why']})"
    if entry["kind"] == "lost_updates":
        return f"{at}: updates are lost in {len(entry['layers'])} layers"
    return None


def last_step(path: Path) -> dict[str, Any] | None:
    """Return the last complete step of a precision record, read from its end; None if there is none yet.

    Raises:
        OSError: if the file cannot be read; a missing one has no step.
    """
    for line in _from_the_end(path):
        try:
            return with_series(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue  # a line that a kill cut off
    return None


def _from_the_end(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file, the last one first."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        place, rest, complete = stream.seek(0, os.SEEK_END), b"", False
        while place:
            size = min(BLOCK, place)
            place -= size
            stream.seek(place)
            lines = (stream.read(size) + rest).split(b"\n")
            rest = lines[0]
            for line in reversed(lines[1:]):
                if complete:
                    yield line
                complete = True  # behind the last newline is a line that is being written
        if rest and complete:
            yield rest


def kind_of(path: Path) -> str | None:
    """Return what a JSON-lines file is: "metrics", "record", "empty", or None for another file."""
    with path.open("rb") as stream:
        head = stream.read(BLOCK // 16)
    if not head:
        return "empty"
    if any(line.startswith((b'{"kind":', b'{"kind" :')) for line in head.splitlines()):
        return "metrics"
    return "record" if head.startswith(b'{"iteration":') and b'"columns"' in head else None


def runs_below(path: Path) -> list[WatchedRun]:
    """Return the runs of a folder, at any depth, or of a metrics file, the one that was written last at the end.

    Raises:
        ValueError: if `path` does not exist, or is a file of another kind.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a run's folder, or the file of the trainer's --metrics-file")
    if path.is_file():
        kind = kind_of(path)
        if kind not in ("metrics", "empty"):
            what = "a precision record" if kind == "record" else "not a metrics file"
            raise ValueError(f"{path} is {what}: give the file of the trainer's --metrics-file, or its folder")
        files, root = [path], path.parent
    else:
        files, root = sorted(path.rglob("*.jsonl")), path
    by_folder: dict[Path, dict[str, list[Path]]] = {}
    for file in files if path.is_dir() else sorted(root.glob("*.jsonl")):
        if (kind := kind_of(file) if file.is_file() else None) is not None:
            by_folder.setdefault(file.parent, {}).setdefault(kind, []).append(file)
    runs = []
    for folder, kinds in by_folder.items():
        metrics = [file for file in (*kinds.get("metrics", ()), *(() if "metrics" in kinds else kinds.get("empty", ()))) if file in files]
        records = kinds.get("record", [])
        every = len(kinds.get("metrics", ())) or 1
        unclear = None
        if len(records) > 1 or (records and every > 1):
            unclear = f"{folder} has {every} metrics files and {len(records)} precision records: give each run its own folder"
        for file in metrics:
            name = file.parent.relative_to(root).as_posix() if len(metrics) == 1 else file.relative_to(root).as_posix()
            record = records[0] if records and unclear is None else None
            runs.append(WatchedRun(name=root.name or str(root) if name == "." else name, metrics=file, record=record, unclear=unclear))
    return sorted(runs, key=lambda run: run.metrics.stat().st_mtime)
