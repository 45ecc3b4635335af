"""Small files of runs as the trainer writes them, for the tests of `msamp watch`."""

import json
from pathlib import Path
from typing import Any

START: dict[str, Any] = {
    "kind": "precision",
    "bytes_per_parameter": {"weight": 2},
    "parameters": 10,
    "recipe": "O2",
    "start": 0,
    "iterations": 100,
    "host": "node",
    "pid": 4321,
    "started": 1e9,
}


def train(iteration: Any, loss: float | None = 3.0, **more: Any) -> dict[str, Any]:
    line = {"kind": "train", "iteration": iteration, "tokens": 10, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "skipped": 0}
    return line | {"step_ms": 2000.0, "tokens_per_s": 1500.0, "memory_gib": 0.5, "grad_underflow": 2e-4} | more


def end(iteration: int, status: str = "completed", why: str | None = None) -> dict[str, Any]:
    return {"kind": "end", "iteration": iteration, "status": status, "why": why}


def lines(path: Path, *entries: dict[str, Any], more: bool = False) -> Path:
    """Write entries; with `more`, append them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if more else "w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(entry) + "\n" for entry in entries)
    return path


def record(path: Path, *iterations: int) -> Path:
    """Write a precision record whose layer a.fc1 has an underflow of 1 % per iteration."""
    columns = {"casts": ["underflow", "sqnr_db"], "updates": ["norm", "update_norm", "descent", "lost"]}

    def step(iteration: int) -> dict[str, Any]:
        casts = {
            "a.fc1": {"input": [iteration / 100, 30.0], "grad_output": [0.0, 30.0]},
            "b.fc1": {"input": [0.0, 31.0]},
            "a.norm": {"m": [0.5, 9.0]},
        }
        return {"iteration": iteration, "columns": columns, "casts": casts, "updates": {}, "total": None, "mu": {}}

    return lines(path, *map(step, iterations))


def folder(path: Path, *entries: dict[str, Any], record_too: bool = True) -> Path:
    """Write a run of three logged lines, and `entries` after them, into a folder."""
    lines(path / "metrics.jsonl", START, train(10, 4.0), train(20, 3.0), train(30, 2.0), *entries)
    if record_too:
        record(path / "precision.jsonl", 10, 30)
    return path
