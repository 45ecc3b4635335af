"""Device tables for launches over many tensors: the tensors' addresses, and the assignment of programs to tensors."""

import array
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

Part = tuple[torch.Tensor, bool]
Columns = TypeVar("Columns", bound=NamedTuple)
CAPTURES = 8  # CUDA graph captures per table for which host memory is reserved


def numbered(columns: type[Columns], first: int = 1) -> Columns:
    """Return each column's index by its name. The host fills a row by the names of a NamedTuple, and a kernel reads it by the same names,
    as `row + ROW.value.name` with `ROW = tl.constexpr(numbered(Row))`, so the order is defined in one place.

    Args:
        columns: a NamedTuple of integers.
        first: index of the first column; 1 by default, after the first program's number, which `Tables.lay_out` prepends to each row.
    """
    return columns._make(range(first, first + len(columns._fields)))


def rows_of(columns: Callable[..., NamedTuple], **numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return rows from columns of equal length, given by the names of a NamedTuple."""
    return list(zip(*columns(**numbers), strict=True))


class _LaidOut(NamedTuple):
    """The last layout of a key: its rows, what `lay_out` returned, and whether a capture owns the table."""

    rows: Sequence[tuple[int, ...]]
    result: tuple[torch.Tensor, list[Part]]
    captured: bool


class Tables:
    """The tables of one caller's launches. A table is copied to the device only when its content changes, asynchronously.

    If the content changes during the capture of a CUDA graph (gradients have other addresses in a graph's memory), the graph gets a table
    of its own, and the copy to the device is part of the graph. Run one or two steps before a capture: they reserve the memory for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sent: dict[Hashable, tuple[Any, torch.Tensor]] = {}
        self._spare: dict[Hashable, list[torch.Tensor]] = {}  # pinned: it cannot be allocated during a capture
        self._captured: list[torch.Tensor] = []  # kept alive for the graphs that read them
        self._laid_out: dict[Hashable, _LaidOut] = {}

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _cached(self, key: Hashable, says: Any, make: Callable[[], torch.Tensor], in_place: bool = False) -> torch.Tensor:
        cuda, capturing = self.device.type == "cuda", self._capturing()
        said, table = self._sent.get(key, (None, None))
        if not capturing and table is not None and self._spare.get(key) == []:  # many captures have used what was reserved
            self._spare[key] = list(table.new_empty(CAPTURES, *table.shape, device="cpu", pin_memory=True).unbind())
        if table is None or said != says:
            host = make()
            if capturing:
                spare = self._spare.get(key)
                host = spare.pop().copy_(host) if spare and spare[-1].shape == host.shape else host.pin_memory()
                self._captured.append(host)
                return host.to(self.device, non_blocking=True)
            if cuda and (table is None or table.shape != host.shape):
                self._spare[key] = list(host.new_empty(CAPTURES, *host.shape).pin_memory().unbind())
            host = host.pin_memory() if cuda else host
            if in_place and table is not None and table.shape == host.shape:
                table.copy_(host, non_blocking=True)
            else:
                table = host.to(self.device, non_blocking=True)
            self._sent[key] = (says, table)
        elif capturing:
            self._captured.append(table)
        return table

    def send(self, key: Hashable, numbers: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return numbers as `dtype` [len(numbers)] on the device. The memory stays the same, also for CUDA graphs, while their count does.

        Args:
            key: of the table; a caller has one table per key.
            numbers: the content.
        """
        return self._cached(key, numbers, lambda: torch.tensor(numbers, dtype=dtype, device="cpu"), in_place=True)

    def lay_out(
        self, key: Hashable, rows: Sequence[tuple[int, ...]], wide: int, chunk: int, again: bool = False
    ) -> tuple[torch.Tensor, list[Part]]:
        """Assign programs of `chunk` elements to tensors.

        Args:
            key: as for `send`.
            rows: one per tensor: its number of elements, `wide` addresses for 16-byte accesses, and other numbers for the kernel.
            wide: the number of these addresses.
            chunk: elements per program.
            again: whether this launch follows another one with this key, both eager or in the same capture. If the rows are the same, it
                reuses the table of that launch, so that a capture copies it only once.

        Returns:
            int64 [n, 1 + columns], the rows in another order, each with the number of its first program prepended; and the
            launches: int32 [programs], the row that each program works on, and whether all of them may use 16-byte accesses.
        """
        last, capturing = self._laid_out.get(key), self._capturing()
        # Comparing the rows takes a tenth of the time of laying them out, and tensors usually keep their addresses from step to step.
        if last is not None and (again or not (capturing or last.captured)) and last.rows == rows:
            return last.result
        odd = [functools.reduce(operator.or_, row[: 1 + wide]) % 16 for row in rows]  # 0: the length and each address are multiples of 16
        ordered = rows
        if any(odd):
            ordered = [row for row, bits in zip(rows, odd, strict=True) if not bits] + [
                row for row, bits in zip(rows, odd, strict=True) if bits
            ]
        counts = [-(-row[0] // chunk) for row in ordered]
        first = [0, *itertools.accumulate(counts)]
        numbers = list(itertools.chain.from_iterable(zip(first, *zip(*ordered, strict=True), strict=False)))
        # torch.tensor of a list takes five times as long, for every table whose addresses have changed.
        table = self._cached(key, numbers, lambda: torch.frombuffer(array.array("q", numbers), dtype=torch.int64))
        # With its size: during a capture `HostReads` refuses shapes that follow from values.
        repeated = functools.partial(torch.repeat_interleave, output_size=first[-1])
        owners = self._cached((key, "owners"), counts, lambda: repeated(torch.tensor(counts, device="cpu")).int())
        split = first[odd.count(0)]
        parts = [(owners[:split], True), (owners[split:], False)]
        laid_out = table.view(len(rows), -1), [part for part in parts if part[0].numel()]
        self._laid_out[key] = _LaidOut(list(rows), laid_out, capturing)
        return laid_out
