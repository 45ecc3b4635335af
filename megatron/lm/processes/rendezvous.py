"""How the processes of a run find each other: the rendezvous store at MASTER_ADDR and MASTER_PORT, within a time.

torch's own way knows a timeout for each of its waits and none for all of them, and waits without one for a listener that never answers.
So a thread watches the whole meeting (`deadline`), and what torch says of a single step is said here with the address and the remedy.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed

from megatron.lm.errors import RunStopped

LATE_SECONDS = 5.0  # after the limit: what torch or `meet` has to say by itself names more


def join(backend: str, rank: int, world_size: int, limit: timedelta, timeout: timedelta) -> None:
    """Make the default process group; one process alone without MASTER_ADDR needs neither port nor host name.

    Args:
        backend: of torch.distributed.
        rank, world_size: this process, and how many there are.
        limit: within which all must have come.
        timeout: of later collectives.

    Raises:
        ValueError: MASTER_ADDR or MASTER_PORT is missing or malformed.
        RunStopped: the address is unknown, the port is taken, or not all have come in time.
    """
    if world_size == 1 and "MASTER_ADDR" not in os.environ:
        store: torch.distributed.Store = torch.distributed.HashStore()
    else:
        host, port = _master()
        end = time.monotonic() + limit.total_seconds()
        _resolve(host, port, end)
        left = timedelta(seconds=max(0.1, end - time.monotonic()))
        with_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            if with_agent:  # the launcher holds the store, for all its attempts
                found = torch.distributed.TCPStore(host, port, is_master=False, timeout=left, wait_for_workers=False)
                store = meet(found, rank, world_size, left)
            else:
                store = torch.distributed.TCPStore(host, port, world_size, is_master=rank == 0, timeout=left, multi_tenant=True)
        except RuntimeError as error:
            raise RunStopped(_why(error, host, port, world_size, limit)) from error
        store.set_timeout(timeout)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


@contextlib.contextmanager
def deadline(rank: int, world_size: int, limit: timedelta) -> Iterator[None]:
    """End the process, with exit code 1 and a line on stderr, where the block takes `LATE_SECONDS` longer than `limit`.

    A call that waits for a stranger's answer cannot be interrupted, so there is nothing to unwind.
    """
    done = threading.Event()

    def watch() -> None:
        if not done.wait(limit.total_seconds() + LATE_SECONDS):
            print(f"error on rank {rank}: {_late(world_size, limit)}; {_LISTENER}", file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=watch, name="rendezvous", daemon=True).start()
    try:
        yield
    finally:
        done.set()


_REMEDY = "start all of them, each with the MASTER_ADDR and MASTER_PORT of rank 0 and with its own RANK, or wait longer for them"
_LISTENER = "where something else listens at that port, take another one"


def _late(world_size: int, limit: timedelta) -> str:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"the {world_size} processes have not met at MASTER_ADDR:MASTER_PORT {place} within {limit.total_seconds():g} s "
        f"(--distributed-timeout-minutes {limit / timedelta(minutes=1):g}): {_REMEDY}"
    )


def _master() -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host:
        raise ValueError("MASTER_ADDR is not set: give the host name of rank 0, or start with torchrun, which sets it")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"MASTER_PORT is {port!r}: give a free port of rank 0's machine in [1, 65535], or start with torchrun, which does")
    return host, int(port)


def _resolve(host: str, port: int, end: float) -> None:
    """Wait until the name is known: that of a machine that is just starting may not be yet."""
    told = False
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except OSError as error:
            if time.monotonic() >= end:
                message = f"MASTER_ADDR {host} is unknown ({error.strerror}): give the host name or address of rank 0's machine"
                raise RunStopped(message) from None
            if not told:
                print(f"warning: MASTER_ADDR {host} is unknown so far ({error.strerror}): waiting for it", file=sys.stderr, flush=True)
            told = True
        time.sleep(max(0.0, min(1.0, end - time.monotonic())))


def _why(error: RuntimeError, host: str, port: int, world_size: int, limit: timedelta) -> str:
    if "EADDRINUSE" in str(error):
        return f"MASTER_PORT {port} is taken on {host}: end what listens there, or give all ranks another port"
    first = str(error).strip().partition("\n")[0]
    return f"{_late(world_size, limit)} ({first})"


def meet(store: torch.distributed.Store, rank: int, world_size: int, timeout: timedelta) -> torch.distributed.Store:
    """A part of `store` that holds nothing from before: torchrun keeps its store when it restarts a job, and with it the addresses at
    which processes of the last attempt were to be found. (Its count of restarts would not do: each machine has its own.)

    Every other rank asks rank 0 under an unused name; no earlier rank 0 lives to answer.

    Raises:
        RuntimeError: where not all have come in time.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"ask/{rank}", mine)
        store.wait([f"answer/{mine}"], timeout)
        part = store.get(f"answer/{mine}").decode()
        store.add(f"came/{part}", 1)
        return torch.distributed.PrefixStore(part, store)
    answered: dict[int, bytes] = {}
    end = time.monotonic() + timeout.total_seconds()
    while (came := store.add(f"came/{mine}", 0)) < world_size - 1:
        if time.monotonic() > end:
            raise RuntimeError(f"only {came + 1} of {world_size} processes have started within {timeout.total_seconds():.0f} s")
        for other in range(1, world_size):
            if store.check([f"ask/{other}"]) and answered.get(other) != (asked := store.get(f"ask/{other}")):
                store.set(f"answer/{asked.decode()}", mine)
                answered[other] = asked
        time.sleep(0.05)
    return torch.distributed.PrefixStore(mine, store)
