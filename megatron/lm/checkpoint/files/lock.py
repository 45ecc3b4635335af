"""One job in a folder of checkpoints.

The lock is on a file in the folder, and files can be deleted and folders replaced while they are held: a second job would then lock
another file and enter. So a job keeps the folder and the file open, which also keeps their inodes from being given to others, and sees
before it writes whether the names still lead to them.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron.lm.shell.opening import to_write

LOCK_FILE = ".lock"


class FolderLock:
    """A folder of checkpoints that this process holds; see `locked`."""

    def __init__(self, root: Path, folder: int, stream: BinaryIO) -> None:
        self.root, self._folder, self._stream = root, folder, stream

    def check(self) -> None:
        """ValueError where the folder, or the lock in it, has been replaced: another job may have entered."""
        for path, descriptor in ((self.root, self._folder), (self.root / LOCK_FILE, self._stream.fileno())):
            try:
                there = path.stat()
            except OSError:
                there = None
            if there is None or not os.path.samestat(there, os.fstat(descriptor)):
                raise ValueError(
                    f"{path} was {'deleted' if there is None else 'replaced'} while this job held it, and another may save there now: see "
                    f"what is in {self.root}, and start again"
                )


@contextlib.contextmanager
def locked(root: Path) -> Iterator[FolderLock]:
    """Hold a folder of checkpoints against other jobs as long as the block runs, however it ends (a kill frees it too).

    Raises:
        ValueError: another job saves there, naming its host and process; or the folder cannot be written.
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
                f"--save {root} cannot be written ({error.strerror}); give another folder, or the right to write there"
            ) from None
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not held on by the data loader's forks after a kill
        except BlockingIOError:
            holder = stream.read().decode("utf-8", "replace") or "another job"
            raise ValueError(
                f"--save {root} is in use by {holder}; two jobs in one folder would lose checkpoints: end it, or give another --save"
            ) from None
        stream.truncate(0)
        stream.write(me.encode())
        held = FolderLock(root, folder, stream)
        held.check()  # the name may have gone to another file between opening and locking it
        yield held
