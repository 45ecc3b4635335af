"""How processes find each other, and how long they look: each failure names the address and what to do."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron.lm.errors import RunStopped
from megatron.lm.processes import rendezvous

ROOT = Path(__file__).parents[4]


def test_who_meets_again_in_an_old_store_finds_nothing_of_before():
    store, limit = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), timedelta(seconds=30)
    for word in ("first", "second"):
        with ThreadPoolExecutor(3) as pool:
            # Rank 0 comes last, when the questions of the others, and those of the last attempt, stand there.
            came = [pool.submit(rendezvous.meet, store.clone(), rank, 3, limit) for rank in (2, 1, 0)]
            parts = [each.result() for each in came]
        assert not any(part.check(["word"]) for part in parts)
        parts[0].set("word", word)
        assert {part.get("word") for part in parts} == {word.encode()}


def test_processes_that_do_not_come_are_not_waited_for_for_ever():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match="only 1 of 3 processes started within 0 s"):
        rendezvous.meet(store, 0, 3, timedelta(seconds=0.2))


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Something that listens and never answers, at MASTER_ADDR and MASTER_PORT."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
        yield listener


def refusal(rank: int = 0, world_size: int = 2, seconds: float = 0.5) -> str:
    limit, started = timedelta(seconds=seconds), time.monotonic()
    with pytest.raises((ValueError, RunStopped)) as caught:
        rendezvous.join("gloo", rank, world_size, limit, limit)
    assert time.monotonic() - started < seconds + 10
    assert not torch.distributed.is_initialized()
    return str(caught.value)


@pytest.mark.promise("Starting and ending", "An occupied port is named.")
def test_a_port_that_is_taken(master: socket.socket):
    port = master.getsockname()[1]
    assert refusal() == f"MASTER_PORT {port} is in use on 127.0.0.1: stop the program that listens there, or set another port on all ranks"


@pytest.mark.promise("Starting and ending", "An unknown host is named.")
def test_an_unknown_host(master: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    assert "MASTER_ADDR nowhere.invalid is unknown (" in refusal()
    assert capsys.readouterr().err.count("warning: MASTER_ADDR nowhere.invalid is unknown so far (") == 1


def test_a_meeting_that_takes_too_long_ends_the_process(
    master: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    codes: list[int] = []
    monkeypatch.setattr(rendezvous, "LATE_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous.os, "_exit", codes.append)
    with rendezvous.deadline(1, 2, timedelta(seconds=0.05)):
        time.sleep(0.3)
    with rendezvous.deadline(1, 2, timedelta(seconds=0.05)):
        pass
    time.sleep(0.1)
    assert codes == [1]
    said = capsys.readouterr().err
    assert said.startswith("error on rank 1: the 2 processes did not all connect to MASTER_ADDR:MASTER_PORT 127.0.0.1:")
    assert "if another program listens on that port, choose another port" in said


SCRIPT = """
from datetime import timedelta
from megatron.lm.processes import rendezvous
if __name__ == "__main__":
    limit = timedelta(seconds=1)
    with rendezvous.deadline(1, 2, limit):
        rendezvous.join("gloo", 1, 2, limit, limit)
"""


@pytest.mark.promise("Starting and ending", "Processes that do not meet end within `--distributed-timeout-minutes` and name the address.")
@pytest.mark.nightly(12)
def test_a_stranger_who_listens_and_never_answers_is_left_in_time(master: socket.socket):
    """In a process of its own, which the deadline ends."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "the 2 processes did not all connect to MASTER_ADDR:MASTER_PORT 127.0.0.1:" in last
    assert "within 1 s" in last


def _listens_at(port: int) -> set[str]:
    """Addresses at which this machine listens on a port, as the kernel lists them: hexadecimal."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


_LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
@pytest.mark.promise("Starting and ending", "With MASTER_ADDR=127.0.0.1 nothing outside of the machine reaches the rendezvous.")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_rendezvous_on_one_machine_stays_there(
    master: socket.socket, monkeypatch: pytest.MonkeyPatch, host: str, capsys: pytest.CaptureFixture[str]
):
    port = master.getsockname()[1]
    master.close()
    monkeypatch.setenv("MASTER_ADDR", host)
    limit, heard = timedelta(seconds=60), []
    try:
        rendezvous.join("gloo", 0, 1, limit, limit, lambda store: heard.append(_listens_at(port)))
        assert heard[0]
        assert heard[0] <= _LOOPBACK
    finally:
        torch.distributed.destroy_process_group()
    assert "listens on every address" not in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
@pytest.mark.parametrize(("agent", "host"), [(False, "another"), (True, "127.0.0.1"), (True, "another")])
def test_a_rendezvous_that_others_reach_says_so(
    agent: bool, host: str, master: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """torchrun's store is open with a loopback address too."""
    port = master.getsockname()[1]
    master.close()
    limit = timedelta(seconds=60)
    if agent:
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    if host == "another":
        monkeypatch.setattr(rendezvous, "_is_loopback", lambda host, port: False)
    heard: list[set[str]] = []
    try:
        rendezvous.join("gloo", 0, 1, limit, limit, lambda store: heard.append(_listens_at(port)))
    finally:
        torch.distributed.destroy_process_group()
    what = f"torchrun's port {port} listens on every address of the machine 127.0.0.1"
    what = what if agent else f"port {port} listens on every address of this machine"
    line = f"rendezvous: {what}: keep it inside the job's network"
    assert line in capsys.readouterr().err
    assert heard[0]
    assert not heard[0] & _LOOPBACK
    if agent:
        assert store.num_keys() > 0
