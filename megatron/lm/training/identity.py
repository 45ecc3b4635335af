"""Which run a checkpoint is of.

A run gets its identity when it starts anew, and writes it into every checkpoint. A job that resumes from a folder into the same
folder is the same run. A job that loads from elsewhere, or takes the weights alone, begins a child, which names the checkpoint that it
came from. A checkpoint without an identity is older than identities: its seal stands for it as a parent, and a run that resumes in its
folder adopts it.
"""

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Parent:
    """The checkpoint from which a run began: `run` is its identity; `finetune`: whether the weights alone were taken."""

    run: str
    iteration: int
    finetune: bool


@dataclass(frozen=True)
class Run:
    """One run, however often it was started again.

    Attributes:
        id: made once, unlike any other.
        parent: None for one that began with fresh weights.
        adopted: whether checkpoints without identity in its folder are its own.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: Parent | None = None
    adopted: bool = False

    def holds(self, info: Mapping[str, Any]) -> bool:
        """Whether the checkpoint with this `checkpoint.json` is of this run."""
        found = of(info)
        return self.adopted if found is None else found.id == self.id

    def resumed(self, info: Mapping[str, Any]) -> "Run":
        """The run that goes on in the folder of this checkpoint: its own, or where it has none this one, which adopts it."""
        return of(info) or replace(self, adopted=True)

    def child_of(self, info: Mapping[str, Any], finetune: bool) -> "Run":
        """This run, begun from a checkpoint of another."""
        return replace(self, parent=Parent(name(info), info["iteration"], finetune))

    def entry(self) -> dict[str, Any]:
        """For `checkpoint.json`."""
        return asdict(self)


def of(info: Mapping[str, Any]) -> Run | None:
    """The run of a checkpoint, from its `checkpoint.json`; None where it names none."""
    entry = info.get("run")
    if entry is None:
        return None
    return Run(entry["id"], Parent(**entry["parent"]) if entry["parent"] else None, entry["adopted"])


def name(info: Mapping[str, Any]) -> str:
    """What stands for the run of a checkpoint: its identity, or the checkpoint's seal."""
    found = of(info)
    return found.id if found is not None else info["seal"]
