"""Lock of a checkpoint folder, so that only one job saves in it.

The lock is on a file in the folder. The file can be deleted, or the folder replaced, while a job holds the lock; a second job would then
lock another file. So a job keeps folder and file open, which also prevents reuse of their inodes, and checks before each save that their
paths still lead to them.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron.lm.shell.files import to_write

LOCK_FILE = ".lock"


class FolderLock:
    """A checkpoint folder that this process has locked; see `locked`."""

    def __init__(self, root: Path, folder: int, stream: BinaryIO) -> None:
        self.root, self._folder, self._stream = root, folder, stream

    def check(self) -> None:
        """Raise a ValueError if the folder or its lock file was replaced, since another job may save there."""
        for path, descriptor in ((self.root, self._folder), (self.root / LOCK_FILE, self._stream.fileno())):
            try:
                there = path.stat()
            except OSError:
                there = None
            if there is None or not os.path.samestat(there, os.fstat(descriptor)):
                raise ValueError(
                    f"{path} was {'deleted' if there is None else 'replaced'} while this job had locked it, and another may save there "
                    f"now: check {self.root}, and start again"
                )


@contextlib.contextmanager
def locked(root: Path, flag: str = "--save") -> Iterator[FolderLock]:
    """Lock a checkpoint folder, the value of `flag`, against other jobs during the block; a kill releases the lock too.

    Raises:
        ValueError: if another job saves there, with its host and process; or if the folder cannot be written.
    """
    me = f"process {os.getpid()} on {socket.gethostname()}"
    with contextlib.ExitStack() as open_files:
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            open_files.callback(os.close, folder)
            stream = open_files.enter_context(to_write(root / LOCK_FILE))
        except OSError as error:
            raise ValueError(
                f"{flag} {root} cannot be written ({error.strerror}); choose another folder, or change its permissions"
            ) from None
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not inherited by data loader forks, which outlive a kill
        except BlockingIOError:
            holder = stream.read().decode("utf-8", "replace") or "another job"
            raise ValueError(
                f"{flag} {root} is in use by {holder}; two jobs in one folder would lose checkpoints: stop it, or choose another {flag}"
            ) from None
        stream.truncate(0)
        stream.write(me.encode())
        held = FolderLock(root, folder, stream)
        held.check()  # the file may have been replaced between opening and locking it
        yield held
