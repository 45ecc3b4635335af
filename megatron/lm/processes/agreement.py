"""Let all ranks fail together: if one rank raises, all raise, and none hangs in a collective."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def all_or_none(work: Callable[[], T], message: str = "{}", group: dist.ProcessGroup | None = None) -> T:
    """Run `work()` on every rank of a group, and return this rank's result. Collective.

    Args:
        work: must raise OSError, RuntimeError (torch's error for a full disk) or ValueError if it fails.
        message: error message, with `{}` for the first failure.
        group: None is all ranks.

    Raises:
        ValueError: on every rank, if `work` failed on one.
    """
    result, problem = None, None
    try:
        result = work()
    except (OSError, RuntimeError, ValueError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group)
    first = next((p for p in problems if p is not None), None)
    if first is not None:
        raise ValueError(message.replace("{}", first))
    return cast("T", result)


def rank_0_decides(decide: Callable[[], T]) -> T:
    """Run `decide()` on rank 0 and return its result on every rank (sent by pickle). Collective; a process without process groups runs
    `decide()` itself.

    Raises:
        ValueError: on every rank, if `decide` raised any exception.
    """
    several = dist.is_initialized()
    answer: list[Any] = [None, None]
    if not several or dist.get_rank() == 0:
        try:
            answer = [decide(), None]
        except Exception as error:  # Triton or CUDA may raise anything, and the other ranks are waiting
            answer = [None, str(error) or repr(error)]
    if several:
        dist.broadcast_object_list(answer, 0)
    result, problem = answer
    if problem is not None:
        raise ValueError(problem)
    return cast("T", result)
