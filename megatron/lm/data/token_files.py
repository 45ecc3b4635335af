"""Read the tokens of an indexed dataset by `pread`, with checked lengths, and check ids during the run.

megatron-core maps the file into memory: if it is truncated while the run reads it, the process dies of SIGBUS without a word. Its other
reader (`mmap_bin_files=False`) opens the file for every document, and returns uninitialized memory beyond its end.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset


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
                    "truncated after the start; restore it, and resume from the last checkpoint"
                )
            got += more

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


class TokenDataset(IndexedDataset):
    """megatron-core's indexed dataset, read by `TokenFile`; `prefix`: of its files."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, mmap=False)

    def initialize(self, path_prefix: str, *arguments: Any) -> None:
        super().initialize(path_prefix, *arguments)
        self.bin_reader = TokenFile(path_prefix)


def check_ids(tokens: np.ndarray, vocab_size: int, prefix: str) -> None:
    """Raise a ValueError if an id is outside [0, vocab_size); `tokens`: of any integer dtype, int64 after megatron-core's own cast."""
    if len(tokens) and (np.maximum.reduce(tokens) >= vocab_size or np.minimum.reduce(tokens) < 0):
        wrong = int(tokens[(tokens >= vocab_size) | (tokens < 0)][0])
        raise ValueError(
            f"dataset {prefix}: token id {wrong} is outside the tokenizer's [0, {vocab_size}): {prefix}.bin was changed after the start, "
            "when its ids were checked; restore it, and resume from the last checkpoint"
        )
