"""A failure of one rank is raised on every rank."""

import pytest
import torch.distributed as distributed

from helpers import dist
from megatron.lm.processes.agreement import all_or_none, rank_0_decides


def fails_on(rank: int, error: Exception) -> int:
    """The work of a rank; `rank` fails with `error`."""
    if distributed.get_rank() == rank:
        raise error
    return distributed.get_rank()


def message_of(work) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        work()
    return str(caught.value)


def works_together() -> tuple[int, str, str]:
    own = all_or_none(distributed.get_rank)
    first = message_of(lambda: all_or_none(lambda: fails_on(1, OSError("the disk {is} full")), "cannot save: {}; free space"))
    second = message_of(lambda: all_or_none(lambda: fails_on(0, RuntimeError("torch says so"))))
    return own, first, second


def decides() -> tuple[int, str, str]:
    decided = rank_0_decides(distributed.get_rank)
    # What only rank 0 does cannot fail elsewhere, and an error without words is named by its type.
    told = message_of(lambda: rank_0_decides(lambda: fails_on(0, KeyError("no such key"))))
    return decided, told, message_of(lambda: rank_0_decides(lambda: fails_on(0, MemoryError())))


def test_all_ranks_raise_the_first_failure_of_any():
    messages = "cannot save: the disk {is} full; free space", "torch says so"
    assert dist.run(works_together, 2) == [(0, *messages), (1, *messages)]


def test_rank_0_decides_for_all():
    assert dist.run(decides, 2) == [(0, "'no such key'", "MemoryError()")] * 2
