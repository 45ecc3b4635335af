"""Measured rows, and whether they may be published: each names the commit it was measured at, and the history must know it."""

import csv
import functools
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What follows from shapes, the planner's also from its rates, and names no commit; a test computes each anew.
COMPUTED = tuple(f"tools/reproduce/results/{name}.csv" for name in ("table7", "table8", "planner"))
PREDICTED = COMPUTED[2]
DIRTY, UNKNOWN = "+", "?"  # behind a commit: its tree had uncommitted changes; it is not in the history
Row = Mapping[str, str]


@dataclass(frozen=True)
class History:
    """The commits that git has. Of a shallow clone, or outside git, `whole` is False and a commit that is missing proves nothing."""

    commits: frozenset[str]
    whole: bool

    @classmethod
    def of(cls, root: Path) -> "History":
        """The history of the checkout in `root`."""

        def git(*words: str) -> str:
            return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout

        try:
            commits = frozenset(git("rev-list", "HEAD").split())
            return cls(commits, git("rev-parse", "--is-shallow-repository").strip() == "false")
        except (OSError, subprocess.CalledProcessError):
            return cls(frozenset(), False)

    def knows(self, commit: str) -> bool:
        """Whether a commit of the history begins with this hash."""
        return len(commit) >= 7 and any(known.startswith(commit) for known in self.commits)


def marked(row: Row) -> bool:
    """Whether the row itself says that its tree cannot be had again."""
    return row.get("commit", "").endswith((DIRTY, UNKNOWN))


def unproven(rows: Iterable[Row], name: str, history: History) -> list[str]:
    """The commits that this clone cannot check.

    Raises:
        ValueError: a row without a commit, or one with a commit that a whole history lacks and that does not say so.
    """
    missing = []
    for commit in sorted({row.get("commit", "") for row in rows}):
        if not commit:
            raise ValueError(f"{name} has rows without a commit: measure them again")
        if commit.endswith((DIRTY, UNKNOWN)) or history.knows(commit):
            continue
        if history.whole:
            raise ValueError(
                f"{name} names the commit {commit}, which the history does not have: measure its rows again, or mark them by "
                f"{commit}{UNKNOWN}, and they are published with a mark"
            )
        missing.append(f"{name}: {commit}")
    return missing


@functools.cache
def _read(path: Path) -> tuple[Row, ...]:
    with path.open(encoding="utf-8", newline="") as stream:
        return tuple(csv.DictReader(stream))


def read(name: str, root: Path = ROOT) -> tuple[Row, ...]:
    """The rows of a file of results, by its path in the repository."""
    return _read(root / name)
