"""The spawn helper itself: results in rank order, errors with their traceback, no process left behind."""

import os
import time
from dataclasses import dataclass

import psutil
import pytest
import torch

from helpers import dist


@dataclass
class Box:
    value: torch.Tensor


class OddError(Exception):
    """Pickles, but cannot be rebuilt."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def reduce_box(box: Box) -> Box:
    total = box.value + torch.distributed.get_rank()
    torch.distributed.all_reduce(total)
    return Box(total)


def second_rank_fails(kind: str) -> None:
    if os.environ["RANK"] == "1":
        if kind == "odd":
            raise OddError("left", "right")
        if kind == "exit":
            os._exit(7)
        raise ValueError("the reason")
    torch.distributed.barrier()


def never_ends(pid_folder: str) -> None:
    with open(os.path.join(pid_folder, str(os.getpid())), "w"):
        time.sleep(600)


def environment() -> tuple[bool, str, str, int]:
    return torch.distributed.is_initialized(), os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()


def test_results_come_in_rank_order_and_classes_travel():
    results = dist.run(reduce_box, 2, Box(torch.tensor([1.0, 2.0])))
    assert [r.value.tolist() for r in results] == [[3.0, 5.0], [3.0, 5.0]]


def test_without_init_the_environment_is_torchruns():
    assert dist.run(environment, 2, init=False) == [(False, "0", "2", 1), (False, "1", "2", 1)]


def test_first_failure_is_raised_with_its_traceback():
    with pytest.raises(ValueError, match="the reason") as caught:
        dist.run(second_rank_fails, 2, "plain")
    note = caught.value.__notes__[0]
    assert note.startswith("on rank 1:")
    assert "second_rank_fails" in note


def test_exception_that_cannot_be_rebuilt_is_still_told():
    with pytest.raises(RuntimeError) as caught:
        dist.run(second_rank_fails, 2, "odd")
    assert "OddError: leftright" in caught.value.__notes__[0]


def test_runs_side_by_side_have_their_results_in_order_and_the_first_failure_is_raised():
    one, two = dist.side_by_side(lambda: dist.run(environment, 1, init=False), lambda: dist.run(environment, 2, init=False))
    assert [len(one), len(two)] == [1, 2]
    with pytest.raises(ValueError, match="the reason"):
        dist.side_by_side(lambda: dist.run(second_rank_fails, 2, "plain"), lambda: dist.run(environment, 1, init=False))


def test_silent_death_is_an_error():
    with pytest.raises(RuntimeError, match=r"exit codes by rank: .*1: 7"):
        dist.run(second_rank_fails, 2, "exit")


@pytest.mark.nightly
def test_timeout_kills_the_stragglers(tmp_path):
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        dist.run(never_ends, 2, str(tmp_path), timeout=20)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert pids, "the processes should have started within the timeout"
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_local_functions_are_refused():
    with pytest.raises(ValueError, match="top level"):
        dist.run(lambda: None, 1)
