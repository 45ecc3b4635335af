"""Rank and world size of this process, from torchrun's environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Rank and number of processes, in the job and on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def launch_from_environment(environment: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them; without any of them there is one process.

    Raises:
        ValueError: if only one of RANK and WORLD_SIZE is set, a value is not an integer, or a rank is out of range.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return LaunchEnvironment()
    rank, world_size = _integer(environment, "RANK"), _integer(environment, "WORLD_SIZE")
    local_rank = _integer(environment, "LOCAL_RANK", default=rank)
    local_world_size = _integer(environment, "LOCAL_WORLD_SIZE", default=world_size)
    for name, value, count_name, count in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
    ):
        if not 0 <= value < count:
            raise ValueError(f"{name}={value} must be at least 0 and below {count_name}={count}: {_FIX}")
    return LaunchEnvironment(rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)


_FIX = "start with `torchrun --nproc-per-node N -m megatron.lm.pretrain ...`, or unset RANK and WORLD_SIZE to train on one process"


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        state = "is not set beside it" if text is None else f"is {text!r}"
        raise ValueError(f"{name} {state} but must be an integer: {_FIX}") from None
