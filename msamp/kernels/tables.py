"""The table on the device that a launch over many tensors reads: their addresses, and how its programs are spread over them."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

Part = tuple[torch.Tensor, bool]
Columns = TypeVar("Columns", bound=NamedTuple)
CAPTURES = 8  # of one table; host memory is put aside for so many


def numbered(columns: type[Columns], first: int = 1) -> Columns:
    """Each column's number by its name. A packer fills a row by the names of a NamedTuple, and a kernel reads it by the same names, as
    `row + ROW.value.name` with `ROW = tl.constexpr(numbered(Row))`: the order stands in one place.

    Args:
        columns: a NamedTuple of whole numbers.
        first: number of the first one; 1 comes after the number of its first program, which `Tables.lay_out` puts before a row.
    """
    return columns._make(range(first, first + len(columns._fields)))


def rows_of(columns: Callable[..., NamedTuple], **numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows from the numbers of each column, all as many, by the names of a NamedTuple."""
    return list(zip(*columns(**numbers), strict=True))


class Tables:
    """Tables of one user's launches. They are sent to the device again only when their content has changed, and without waiting for it.

    While a CUDA graph is captured, a table with new content (gradients have other addresses in a graph's memory) is the graph's own: its
    copy to the device is part of the graph. Run a step or two before a capture: they put the memory for it aside.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sent: dict[Hashable, tuple[Any, torch.Tensor]] = {}
        self._spare: dict[Hashable, list[torch.Tensor]] = {}  # pinned: none can be had during a capture
        self._captured: list[torch.Tensor] = []  # what graphs read, here to stay
        self._laid_out: dict[Hashable, tuple[list[int], tuple[torch.Tensor, list[Part]]]] = {}

    def _cached(self, key: Hashable, says: Any, make: Callable[[], torch.Tensor], in_place: bool = False) -> torch.Tensor:
        cuda = self.device.type == "cuda"
        capturing = cuda and torch.cuda.is_current_stream_capturing()
        said, table = self._sent.get(key, (None, None))
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
        """`dtype` [len(numbers)] on the device; in the same memory, which graphs may hold, as long as their count is the same.

        Args:
            key: names the table; one user keeps one table a key.
            numbers: what it holds.
        """
        return self._cached(key, numbers, lambda: torch.tensor(numbers, dtype=dtype), in_place=True)

    def lay_out(
        self, key: Hashable, rows: Sequence[tuple[int, ...]], wide: int, chunk: int, again: bool = False
    ) -> tuple[torch.Tensor, list[Part]]:
        """Spread programs of `chunk` elements over tensors.

        Args:
            key: as for `send`.
            rows: one a tensor: its number of elements, `wide` addresses that programs read and write 16 bytes at a time, and what
                else the kernel wants to know of it.
            wide: how many such addresses there are.
            chunk: elements a program.
            again: this launch follows another with this key, eager as that was or in the same capture: where the rows are the same it takes
                that one's table, so that no capture copies it twice.

        Returns:
            int64 [n, 1 + columns], each row with the number of its first program before it, in an order of its own; and the
            launches: int32 [programs], the row that each program works on, and whether all of them may use 16-byte accesses.
        """
        even = [not any(number % 16 for number in row[: 1 + wide]) for row in rows]
        ordered = [row for row, good in zip(rows, even, strict=True) if good] + [
            row for row, good in zip(rows, even, strict=True) if not good
        ]
        counts = [-(-row[0] // chunk) for row in ordered]
        first = [0, *itertools.accumulate(counts)]
        numbers = [number for start, row in zip(first, ordered, strict=False) for number in (start, *row)]
        if again and key in self._laid_out and self._laid_out[key][0] == numbers:
            return self._laid_out[key][1]
        table = self._cached(key, numbers, lambda: torch.tensor(numbers, dtype=torch.int64))
        owners = self._cached((key, "owners"), counts, lambda: _owners(counts))
        split = first[sum(even)]
        parts = [(owners[:split], True), (owners[split:], False)]
        laid_out = table.view(len(rows), -1), [part for part in parts if part[0].numel()]
        self._laid_out[key] = (numbers, laid_out)
        return laid_out


def _owners(counts: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts, dtype=torch.int64))
