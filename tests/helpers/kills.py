"""Kills at every moment at which the disk changes: as an exception in this process, or as SIGKILL in a fork; and disks that fail."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FULL = OSError(errno.ENOSPC, "No space left on device")


def failing(error: BaseException) -> Callable[..., None]:
    """A function that raises `error`."""

    def write(*args: object, **options: object) -> None:
        raise error

    return write


class Killed(BaseException):
    """What a kill looks like from inside."""


def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> list[str]:
    """From now on the process dies before its call number `after` (from 0) that changes the disk; the calls it came to."""
    calls: list[str] = []

    def replace(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if len(calls) >= after:
                raise Killed
            calls.append(name)
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        replace(name)
    return calls


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
