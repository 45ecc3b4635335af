"""Bytes on the wire: how many each collective sends from one rank."""

import contextlib
from collections.abc import Iterator, Sequence

KINDS = ("weight", "activation")


def all_to_all_sent(split_bytes: Sequence[int], rank: int) -> int:
    """Bytes that `rank` sends in an all-to-all with `split_bytes[r]` for rank r: all but its own."""
    return sum(split_bytes) - split_bytes[rank]


def all_gather_sent(slice_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-gather of `slice_bytes` from each of `ranks`."""
    return slice_bytes * (ranks - 1)


def all_reduce_sent(total_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of `total_bytes`: 2 (N - 1) / N of them, rounded up."""
    return -(-2 * (ranks - 1) * total_bytes // ranks)


class WireBytes:
    """Bytes that this rank sent since the last `take`, by kind (one of `KINDS`) and collective ("grad all-to-all")."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], int] = {}

    def add(self, kind: str, collective: str, sent: int) -> None:
        """Count `sent` bytes."""
        self._sent[kind, collective] = self._sent.get((kind, collective), 0) + sent

    def total(self, kind: str) -> int:
        """Bytes of one kind."""
        return sum(sent for (k, _), sent in self._sent.items() if k == kind)

    def rows(self) -> dict[tuple[str, str], int]:
        """Bytes by (kind, collective)."""
        return dict(self._sent)

    def take(self) -> dict[tuple[str, str], int]:
        """Return `rows` and reset the counts."""
        sent, self._sent = self._sent, {}
        return sent

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context in which nothing is counted, for collectives outside of steps, such as evaluation."""
        kept = self._sent
        self._sent = {}
        try:
            yield
        finally:
            self._sent = kept
