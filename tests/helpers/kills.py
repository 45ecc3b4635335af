"""Kills at the moments between two files that get their names."""

import os
import signal
from collections.abc import Callable
from pathlib import Path


def killed_at_a_rename(renames: int, work: Callable[[], object]) -> bool:
    """Do the work in a fork, with SIGKILL in place of the rename behind `renames` others; whether it came to that."""
    child = os.fork()
    if not child:
        replace, left = Path.replace, [renames]

        def counted(self: Path, target: Path) -> Path:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return replace(self, target)

        Path.replace = counted  # type: ignore[method-assign]
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL
