"""The SHA-256 of the training tokens, computed once in a thread while the run starts and trains.

The digest in `order` covers samples of a file, so it is there at once but does not notice a changed token between them. This one covers
all tokens. A thread reads the `.bin` files in chunks, outside of Python's lock, and keeps each digest in the folder of the index caches:

    FOLDER/token_digests.json   {"INODE-SIZE-MTIME-CTIME": SHA-256}, times in ns

The next start takes a digest from there as long as the file has the same inode, size and times. The digest of a file that changed in the
last seconds before it was read is not kept, since another change might not move its times.

Ranks that see the same file (inode, size and times) share the work: the lowest of them reads it. On node-local disks that is one rank per
machine. The ranks compare what they read, and agree on when it is known, in `TokenDigests.exchange`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from megatron.lm.data.reading.order import sources
from megatron.lm.shell.durable import written_aside
from megatron.lm.shell.opening import own_folder, read_text

NOTE = "token_digests.json"
SMALL = 2**28  # bytes for which a start or a save waits, about half a second
WHOLE = "whole"  # the key of a digest in the entry `data` of a checkpoint
_CHUNK = 2**22
_RECENT = 2.0  # seconds; file systems store times of up to 2 s
_TRIES = 3  # for a file that changes while it is read
_MOST_KEPT = 10_000


class TokenDigests:
    """The digests of the training data's `.bin` files. Every rank creates it together with the others.

    Args:
        train: from `build_datasets`; None if there is no training data.

    Raises:
        ValueError: on every rank, if a file cannot be read, or the ranks' digests in their caches differ.
    """

    def __init__(self, train: Dataset | None) -> None:
        self.files = sources(train)
        own_notes: list[tuple[str, str | None, str]] = []
        sizes, problem = [], None
        try:
            for prefix, folder in self.files:
                state = os.stat(f"{prefix}.bin")
                sizes.append(state.st_size)
                own_notes.append((_key(state), _read_note(folder).get(_key(state)), prefix))
        except OSError as error:
            problem = f"{error.filename} cannot be read ({error.strerror})"
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (own_notes, problem))
        self._raise(problem for _, problem in everyone)
        # By number of the file and its key. A file has several keys if machines have their own copies of it.
        self._known: dict[tuple[int, str], str | None] = {}
        reader: dict[tuple[int, str], int] = {}
        for rank, (files, _) in enumerate(everyone):
            for number, (key, digest, _) in enumerate(files):
                reader.setdefault((number, key), rank)
                self._known[number, key] = self._known.get((number, key)) or digest
        self._key_of = [[files[number][0] for files, _ in everyone] for number in range(len(self.files))]
        self._prefix_of = [[files[number][2] for files, _ in everyone] for number in range(len(self.files))]
        self._check_ranks()
        todo = [number for number, key in reader if reader[number, key] == dist.get_rank() and self._known[number, key] is None]
        self._hashing = Hashing({number: self.files[number] for number in todo}, sum(sizes[number] for number in todo))

    @property
    def settled(self) -> bool:
        """Return whether all digests are known; the same on all ranks."""
        return None not in self._known.values()

    def digest(self, prefix: str) -> str | None:
        """Return the digest of a dataset, which is None until all its copies are known."""
        for number, (name, _) in enumerate(self.files):
            if name == prefix:
                known = {self._known[number, key] for key in self._key_of[number]}
                return None if None in known else known.pop()
        return None

    def exchange(self) -> int:
        """Exchange what the threads of all ranks have read; return how many bytes the slowest has left. Collective.

        Raises:
            ValueError: on every rank, if a file cannot be read or changes, or two machines have other tokens.
        """
        hashing = self._hashing
        own_digests = {(number, self._key_of[number][dist.get_rank()]): digest for number, digest in dict(hashing.digests).items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (own_digests, hashing.problem, hashing.left))
        self._raise(problem for _, problem, _ in everyone)
        for digests, _, _ in everyone:
            self._known |= digests
        self._check_ranks()
        return 0 if self.settled else max(1, *(left for _, _, left in everyone))

    def wait(self, seconds: float) -> None:
        """Wait until this rank has read its files, or for some seconds."""
        self._hashing.thread.join(seconds)

    def close(self) -> None:
        """Stop reading."""
        self._hashing.stopped.set()
        self._hashing.thread.join()

    def _check_ranks(self) -> None:
        for number, prefixes in enumerate(self._prefix_of):
            digests = [self._known[number, key] for key in self._key_of[number]]
            first = next((rank for rank, digest in enumerate(digests) if digest is not None), 0)
            other = next((rank for rank, digest in enumerate(digests) if digest not in (None, digests[first])), None)
            if other is not None:
                raise ValueError(
                    f"the ranks read different data: the training data {prefixes[other]} of rank {other} has other tokens than "
                    f"{prefixes[first]} of rank {first}. Copy the same files to all machines, or use a folder that they share"
                )

    @staticmethod
    def _raise(problems: Any) -> None:
        for problem in problems:
            if problem is not None:
                raise ValueError(problem)


class Hashing:
    """A thread that hashes the `.bin` files of datasets, and keeps the digests.

    Args:
        files: prefix and folder of the index cache, by number.
        size: bytes of all files.

    Attributes:
        digests: by number, of the files that were read so far.
        problem: why no more are read, or None.
        left: bytes that are not read yet.
        stopped: set it to stop.
    """

    def __init__(self, files: Mapping[int, tuple[str, Path]], size: int) -> None:
        self._files = files
        self.digests: dict[int, str] = {}
        self.problem: str | None = None
        self.left = size
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="token digests", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for number, (prefix, folder) in self._files.items():
            path = f"{prefix}.bin"
            try:
                digest = self._hashed(path, folder)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                self.problem = f"dataset {prefix}: {path} cannot be hashed ({reason}); restore it, and resume from the last checkpoint"
                return
            if digest is None:
                return
            self.digests[number] = digest

    def _hashed(self, path: str, folder: Path) -> str | None:
        """Return the digest of a file, or None if stopped; a ValueError if it changes again and again."""
        with open(path, "rb", buffering=0) as stream:
            for _ in range(_TRIES):
                before, begun = os.fstat(stream.fileno()), time.time()
                digest = self._digest(stream)
                if digest is None:
                    return None
                if _key(os.fstat(stream.fileno())) == _key(before):
                    if begun - max(before.st_mtime, before.st_ctime) > _RECENT:
                        _keep(folder, _key(before), digest)
                    return digest
                self.left += before.st_size
        raise ValueError("it changes while it is read")

    def _digest(self, stream: Any) -> str | None:
        stream.seek(0)
        digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        while (got := stream.readinto(chunk)) and not self.stopped.is_set():
            digest.update(chunk[:got])  # without Python's lock, as the read
            self.left -= got
        return None if self.stopped.is_set() else digest.hexdigest()


def _key(state: os.stat_result) -> str:
    return f"{state.st_ino}-{state.st_size}-{state.st_mtime_ns}-{state.st_ctime_ns}"


def _read_note(folder: Path) -> dict[str, str]:
    """Return the digests that were kept; a note that is damaged, or not one of ours, reads as empty."""
    path = folder / NOTE
    try:
        content = json.loads(read_text(path))
        if not isinstance(content, dict) or not all(
            re.fullmatch(r"\d+(-\d+){3}", key) and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
            for key, digest in content.items()
        ):
            raise ValueError("it does not contain digests by inode, size and times")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        print(f"{path} is invalid ({problem}): the tokens are hashed again", flush=True)
        return {}
    return content


def _keep(folder: Path, key: str, digest: str) -> None:
    """Add a digest to the note. Of two ranks that write at once one may be lost, and is computed again at the next start."""
    try:
        own_folder(folder.parent)
        own_folder(folder)
        kept = [*_read_note(folder).items(), (key, digest)]
        with written_aside(folder / NOTE) as stream:
            stream.write(json.dumps(dict(kept[-_MOST_KEPT:])).encode())
    except (OSError, ValueError) as error:
        print(f"warning: {folder / NOTE} cannot be written ({error}): the next start hashes the tokens again", flush=True)


def verify(data: Mapping[str, Any], digests: TokenDigests, saved: str | None, *, override: bool) -> Sequence[str]:
    """Enter the digests that are known into the entry `data` of the next checkpoint, and compare them with those it has from the last one.

    Args:
        data: `order.description` of the training data. `whole` of a dataset is None, or the digest in the checkpoint that was resumed.
        digests: of this run.
        saved: folder of that checkpoint.
        override: `--override-data`: accept other tokens.

    Returns:
        Lines for the log: other tokens that were accepted.

    Raises:
        ValueError: a dataset has other tokens than the checkpoint's.
    """
    lines = []
    for entry in data["datasets"]:
        prefix, digest = entry["prefix"], digests.digest(entry["prefix"])
        if digest is None or entry.get(WHOLE) == digest:
            continue
        if entry.get(WHOLE) is not None:
            what = f"{prefix}.bin has other tokens than when the checkpoint in {saved} was written"
            if not override:
                raise ValueError(
                    f"{what} (all of them were hashed after the start): restore it, and resume from the last checkpoint, or use "
                    "--override-data. Nothing was saved since the start"
                )
            lines.append(f"--override-data: {what}")
        entry[WHOLE] = digest
    return lines


def awaited(data: Mapping[str, Any], digests: TokenDigests) -> bool:
    """Return whether a digest of the checkpoint is still to be compared."""
    return any(entry.get(WHOLE) is not None and digests.digest(entry["prefix"]) is None for entry in data["datasets"])
