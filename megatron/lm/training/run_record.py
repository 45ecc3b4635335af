"""What every checkpoint records of its run: the run's identity, and whether the checkpoint is healthy.

A run gets its ID when it starts from scratch. A job that resumes from a folder and saves to the same folder is the same run. A job that
loads from another folder, or loads only the weights, starts a child run, which records the checkpoint that it started from. A checkpoint
without an ID was written before IDs existed: its seal identifies it as a parent, and a run that resumes in its folder gives it its own ID.

A diverged run writes checkpoints with valid digests that are worth nothing. `--keep-last` would delete the good ones before them, and a
resume would continue from a bad one. So a checkpoint is unhealthy, and records why, if

1. one of its tensors is invalid: NaN, a negative mean of squares, an impossible scale (`checkpoint.tensor_rules`);
2. the last step was skipped, other than in the search for a loss scale: there a step overflows although its loss is finite;
3. no token counted in the last step, or its loss was not finite.

The marker of a folder stays at the newest healthy checkpoint, which `--keep-last` never deletes. Loading skips unhealthy ones, unless
`--ckpt-step` names one and `--load-unhealthy` is set.
"""

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Parent:
    """The checkpoint from which a run started: `run` is its identity; `finetune`: whether only the weights were loaded."""

    run: str
    iteration: int
    finetune: bool


@dataclass(frozen=True)
class Run:
    """One run, however often it was restarted.

    Attributes:
        id: unique, generated once.
        parent: None for a run that started from initial weights.
        adopted: whether checkpoints without an ID in its folder belong to it.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: Parent | None = None
    adopted: bool = False

    def holds(self, info: Mapping[str, Any]) -> bool:
        """Return whether the checkpoint with this `checkpoint.json` belongs to this run."""
        saved_run = run_of(info)
        return self.adopted if saved_run is None else saved_run.id == self.id

    def resumed(self, info: Mapping[str, Any]) -> "Run":
        """Return the run that resumes in the checkpoint's folder: the checkpoint's own, or this one if it has none."""
        return run_of(info) or replace(self, adopted=True)

    def child_of(self, info: Mapping[str, Any], finetune: bool) -> "Run":
        """Return this run as a child of the run that wrote the checkpoint."""
        return replace(self, parent=Parent(run_name(info), info["iteration"], finetune))

    def entry(self) -> dict[str, Any]:
        """Return the entry for `checkpoint.json`."""
        return asdict(self)


def run_of(info: Mapping[str, Any]) -> Run | None:
    """Return the run that wrote a checkpoint, from its `checkpoint.json`, or None."""
    entry = info.get("run")
    if entry is None:
        return None
    return Run(entry["id"], Parent(**entry["parent"]) if entry["parent"] else None, entry["adopted"])


def run_name(info: Mapping[str, Any]) -> str:
    """Return the name of a checkpoint's run: its ID, or else the checkpoint's seal."""
    saved_run = run_of(info)
    return saved_run.id if saved_run is not None else info["seal"]


def health_problem(info: Mapping[str, Any]) -> str | None:
    """Return why a checkpoint is unhealthy, from its `checkpoint.json`; None for a healthy one, and if it has no entry."""
    problem: str | None = info.get("health", {}).get("problem")
    return problem
