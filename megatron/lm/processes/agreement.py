"""Ranks that fail together: where one cannot do its work, all raise, and none waits for the others in a collective."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def all_or_none(work: Callable[[], T], message: str = "{}", group: dist.ProcessGroup | None = None) -> T:
    """Run `work()` on every rank of a group, and return this rank's result. Collective.

    Args:
        work: reports its failures as OSError, RuntimeError (torch's, of a full disk) or ValueError.
        message: of the error, `{}` for the first rank's failure.
        group: None: all ranks.

    Raises:
        ValueError: on every rank, where `work` failed on one.
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
    """Run `decide()` on rank 0 alone, and return its result, which is sent pickled, on every rank. Collective; a process without process
    groups decides for itself.

    Raises:
        ValueError: on every rank, where `decide` raised anything.
    """
    several = dist.is_initialized()
    answer: list[Any] = [None, None]
    if not several or dist.get_rank() == 0:
        try:
            answer = [decide(), None]
        except Exception as error:  # whatever Triton or CUDA raises: the other ranks wait for an answer
            answer = [None, str(error) or repr(error)]
    if several:
        dist.broadcast_object_list(answer, 0)
    result, problem = answer
    if problem is not None:
        raise ValueError(problem)
    return cast("T", result)
