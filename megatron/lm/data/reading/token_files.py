"""Read an indexed dataset whose files may change under the run: both lengths are checked, and tokens are read by `pread`.

megatron-core maps both files into memory: if one is truncated, the process dies of SIGBUS without a word. Its other reader of tokens
(`mmap_bin_files=False`) opens the file for every document, and returns uninitialized memory beyond its end. The index stays mapped, because
the processes of a machine share its pages, so its length is compared with its header before it is mapped and again before each sample is
read. A truncation between check and read still ends in SIGBUS, and on NFS one by another machine that is not visible here yet.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

RESTORE = "restore it, and resume from the last checkpoint"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
MAGIC = b"MMIDIDX\x00\x00"


def index_bytes(header: bytes) -> int:
    """Return the size of an index from its first `HEADER.size` bytes: length (int32) and pointer (int64) of each sequence, and int64
    boundaries."""
    _, _, _, sequences, boundaries = HEADER.unpack_from(header)
    return HEADER.size + sequences * (4 + 8) + boundaries * 8  # type: ignore[no-any-return]


class IndexFile:
    """The `.idx` file of a dataset, which megatron-core maps; `prefix`: of the dataset.

    Raises:
        ValueError: if it cannot be read, or its length is not the one in its header.
    """

    def __init__(self, prefix: str) -> None:
        self.path, self._file = f"{prefix}.idx", -1  # set before the open, which may fail
        try:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            header = os.pread(self._file, HEADER.size, 0)
        except OSError as error:
            raise ValueError(f"dataset {prefix}: {self.path} cannot be read ({error.strerror})") from None
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise ValueError(f"dataset {prefix}: {self.path} is not an index of megatron-core; {RESTORE}")
        self._bytes = index_bytes(header)
        self.check()

    def check(self) -> None:
        """Raise a ValueError if the file is shorter or longer than its header, as it was when it was opened, requires."""
        size = os.fstat(self._file).st_size
        if size != self._bytes:
            raise ValueError(
                f"dataset {self.path.removesuffix('.idx')}: {self.path} has {size} bytes, but its header requires {self._bytes}: it was "
                f"changed after the start; {RESTORE}"
            )

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class TokenFile:
    """A `.bin` file of tokens, as `IndexedDataset.bin_reader`; `prefix`: of the dataset."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._file: int | None = None  # set before the open, which may fail
        self._file = os.open(f"{prefix}.bin", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """Return `count` tokens from byte `offset`.

        Raises:
            ValueError: if the file cannot be read, or ends before: it was truncated after the start.
        """
        tokens = np.empty(count, dtype)
        try:
            got = os.preadv(self._file, (tokens,), offset) if count else 0  # type: ignore[arg-type]
            if got != tokens.nbytes:
                self._rest(tokens, got, offset)
        except OSError as error:
            raise ValueError(f"dataset {self.prefix}: {self.prefix}.bin cannot be read ({error.strerror})") from None
        return tokens

    def _rest(self, tokens: np.ndarray, got: int, offset: int) -> None:
        """Read what a call that was interrupted, or longer than 2 GB, has left."""
        assert self._file is not None
        into = memoryview(tokens).cast("B")  # type: ignore[arg-type]
        while got < len(into):
            more = os.preadv(self._file, [into[got:]], offset + got)
            if not more:
                size = os.fstat(self._file).st_size
                raise ValueError(
                    f"dataset {self.prefix}: {self.prefix}.bin has {size} bytes, but the run reads to byte {offset + len(into)}: it was "
                    f"truncated after the start; {RESTORE}"
                )
            got += more

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class TokenDataset(IndexedDataset):
    """megatron-core's indexed dataset, read by `TokenFile` and guarded by `IndexFile`; `prefix`: of its files.

    `get` leaves the check of the index to its caller, which reads many documents of one sample.

    Raises:
        ValueError: here, when unpickled, and at every other read: a file cannot be read, or was truncated.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, mmap=False)

    def initialize(self, path_prefix: str, *arguments: Any) -> None:
        self.index_file = IndexFile(path_prefix)
        super().initialize(path_prefix, *arguments)
        self.bin_reader = TokenFile(path_prefix)

    def __del__(self) -> None:
        if "index" in vars(self):  # not after an error in `initialize`
            super().__del__()

    def __getitem__(self, idx: Any) -> Any:
        self.index_file.check()
        return super().__getitem__(idx)

    @property
    def sequence_lengths(self) -> np.ndarray:
        self.index_file.check()
        return super().sequence_lengths

    @property
    def document_indices(self) -> np.ndarray:
        self.index_file.check()
        return super().document_indices


def check_ids(tokens: np.ndarray, vocab_size: int, prefix: str) -> None:
    """Raise a ValueError if an id is outside [0, vocab_size); `tokens`: of any integer dtype, int64 after megatron-core's own cast."""
    if len(tokens) and (np.maximum.reduce(tokens) >= vocab_size or np.minimum.reduce(tokens) < 0):
        wrong = int(tokens[(tokens >= vocab_size) | (tokens < 0)][0])
        raise ValueError(
            f"dataset {prefix}: token id {wrong} is outside the tokenizer's [0, {vocab_size}): {prefix}.bin was changed after the start, "
            f"when its ids were checked; {RESTORE}"
        )
