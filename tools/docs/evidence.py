"""Check that measurements may be published: each names the commit it was measured at, which must be in the history."""

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DIRTY, UNKNOWN = "+", "?"  # after a commit: its tree had uncommitted changes; it is not in the history


@dataclass(frozen=True)
class History:
    """The commits that git knows. In a shallow clone, or outside git, `whole` is False and a missing commit proves nothing."""

    commits: frozenset[str]
    whole: bool

    @classmethod
    def of(cls, root: Path) -> "History":
        """Return the history of the checkout in `root`."""

        def git(*words: str) -> str:
            return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout

        try:
            commits = frozenset(git("rev-list", "HEAD").split())
            return cls(commits, git("rev-parse", "--is-shallow-repository").strip() == "false")
        except (OSError, subprocess.CalledProcessError):
            return cls(frozenset(), False)

    def knows(self, commit: str) -> bool:
        """Return whether a commit of the history begins with this hash."""
        return len(commit) >= 7 and any(known.startswith(commit) for known in self.commits)


def unproven(commits: Iterable[str], name: str, history: History) -> list[str]:
    """Return the commits of measurements that this clone cannot check.

    Raises:
        ValueError: a measurement without a commit, or with an unmarked commit that is missing from a complete history.
    """
    missing = []
    for commit in sorted(set(commits)):
        if not commit:
            raise ValueError(f"{name} has rows without a commit: measure them again")
        if commit.endswith((DIRTY, UNKNOWN)) or history.knows(commit):
            continue
        if history.whole:
            raise ValueError(
                f"{name} names the commit {commit}, which the history does not have: measure its rows again, or mark them as "
                f"{commit}{UNKNOWN}, and they are published with a mark"
            )
        missing.append(f"{name}: {commit}")
    return missing
