"""Calls on several processes: one at a time has the GPUs, and one that hangs names itself. On the CPU, over gloo."""

import importlib
import os
import signal
import threading
import time

import pytest
import torch.distributed

from helpers import dist


def took() -> tuple[float, float]:
    torch.distributed.barrier()
    start = time.time()
    time.sleep(0.3)
    return start, time.time()


def test_one_call_at_a_time_has_the_gpus(capsys):
    first, second = sorted(dist.side_by_side(lambda: dist.on_gpus(took, 2), lambda: dist.on_gpus(took, 2)))
    assert max(end for _, end in first) <= min(start for start, _ in second)
    assert capsys.readouterr().out.count("s on the cards") == 2


def waits_for_ever() -> None:
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    time.sleep(60)


def fails_and_stays(seconds: float) -> None:
    threading.Thread(target=time.sleep, args=(seconds,)).start()  # its process ends after it, as after NCCL's groups
    if torch.distributed.get_rank() == 1:
        raise KeyError("rank 1")
    time.sleep(seconds)


def test_a_hang_is_reported_with_all_stacks_and_a_failed_rank_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(dist, "GPU_SECONDS", 10)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] were still running after 10 s") as late:
        dist.on_gpus(waits_for_ever, 2)
    assert ["in barrier" in note for note in late.value.__notes__] == [True, False]
    assert all("in waits_for_ever" in note for note in late.value.__notes__)
    start = time.monotonic()
    with pytest.raises(KeyError, match="rank 1"):
        dist.run(fails_and_stays, 2, 100.0)
    assert time.monotonic() - start < 90


@pytest.mark.parametrize("gpus", [False, True])
def test_a_hang_before_the_function_starts_is_a_timeout_in_seconds(tmp_path, monkeypatch, gpus: bool):
    (tmp_path / "sleeper.py").write_text("import os, time\ntime.sleep(200 * ('RANK' in os.environ))\ndef done(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] were still running after 3 s") as late:
        dist.run(importlib.import_module("sleeper").done, 2, timeout=3, init=not gpus, gpus=gpus)
    assert all("sleeper.py" in note for note in late.value.__notes__)
    assert time.monotonic() - start < 100


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_processes_whose_own_timers_do_not_run_are_ended_too(monkeypatch):
    monkeypatch.setattr(dist, "LATE_SECONDS", 0.5)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        dist.run(stops_itself, 2, timeout=3, init=False)
