"""Rendezvous of a run's processes at MASTER_ADDR and MASTER_PORT within a time limit.

torch has a timeout for each of its waits but none for all of them together, and none at all for a listener that never answers. So a thread
watches the whole rendezvous (`deadline`), and errors of torch are reported with the address and a fix.
"""

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed

from megatron.lm.errors import RunStopped

LATE_SECONDS = 5.0  # after the limit, since errors of torch and `meet` have more details


def join(
    backend: str,
    rank: int,
    world_size: int,
    limit: timedelta,
    timeout: timedelta,
    check: Callable[[torch.distributed.Store], None] = lambda store: None,
) -> None:
    """Create the default process group. A single process without MASTER_ADDR needs neither port nor host name.

    Args:
        backend: of torch.distributed.
        rank, world_size: of this process.
        limit: time for all processes to connect.
        timeout: of later collectives.
        check: called with the store before any group exists; an error that it raises ends the rendezvous.

    Raises:
        ValueError: if MASTER_ADDR or MASTER_PORT is missing or invalid.
        RunStopped: if the address is unknown, the port is in use, or not all processes connected in time.
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
            if with_agent:  # torchrun's agent has the store, for all its restarts
                if rank == 0:  # whatever the host's name: torchrun passes only the port to its store
                    _say_open(f"torchrun's port {port}", f"the machine {host}", world_size)
                other = torch.distributed.TCPStore(host, port, is_master=False, timeout=left, wait_for_workers=False)
                store = meet(other, rank, world_size, left)
            else:
                inside = listener(host, port) if rank == 0 else None
                store = torch.distributed.TCPStore(
                    host, port, world_size, is_master=rank == 0, timeout=left, multi_tenant=True, master_listen_fd=inside
                )
                if rank == 0 and inside is None:
                    _say_open(f"port {port}", "this machine", world_size)
        except RuntimeError as error:
            if "EADDRINUSE" in str(error):
                fix = "stop the program that listens there, or set another port on all ranks"
                raise RunStopped(f"MASTER_PORT {port} is in use on {host}: {fix}") from error
            raise RunStopped(f"{_late(world_size, limit)} ({str(error).strip().partition(chr(10))[0]})") from error
        store.set_timeout(timeout)
    check(store)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


@contextlib.contextmanager
def deadline(rank: int, world_size: int, limit: timedelta) -> Iterator[None]:
    """Exit the process, with code 1 and a line on stderr, if the block takes `LATE_SECONDS` longer than `limit`.

    A call that waits for a reply from another program cannot be interrupted, so an exception would not help.
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


_FIX = "start all of them, each with the MASTER_ADDR and MASTER_PORT of rank 0 and with its own RANK, or raise the limit"
_INSIDE = "keep it inside the job's network, since processes exchange pickled objects there"
_LISTENER = "if another program listens on that port, choose another port"


def _late(world_size: int, limit: timedelta) -> str:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"the {world_size} processes did not all connect to MASTER_ADDR:MASTER_PORT {place} within {limit.total_seconds():g} s "
        f"(--distributed-timeout-minutes {limit / timedelta(minutes=1):g}): {_FIX}"
    )


def _master() -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host:
        raise ValueError("MASTER_ADDR is not set: set it to the host name of rank 0, or start with torchrun, which sets it")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"MASTER_PORT {port!r} is invalid: set a free port in [1, 65535] of rank 0's machine, or start with torchrun")
    return host, int(port)


def _resolve(host: str, port: int, end: float) -> None:
    """Wait until the host name resolves: a machine that is just starting may not have one yet."""
    warned = False
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except UnicodeError as error:
            raise ValueError(f"MASTER_ADDR {host!a:.80} is not a host name ({error}): set it to the name of rank 0's machine") from None
        except OSError as error:
            if time.monotonic() >= end:
                message = f"MASTER_ADDR {host} is unknown ({error.strerror}): set it to the host name or address of rank 0's machine"
                raise RunStopped(message) from None
            if not warned:
                print(f"warning: MASTER_ADDR {host} is unknown so far ({error.strerror}): waiting for it", file=sys.stderr, flush=True)
            warned = True
        time.sleep(max(0.0, min(1.0, end - time.monotonic())))


def _say_open(what: str, machine: str, world_size: int) -> None:
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):  # one machine, where this is what everybody's torchrun does
        return
    print(f"rendezvous: {what} listens on every address of {machine}: {_INSIDE}", file=sys.stderr, flush=True)


def listener(host: str, port: int) -> int | None:
    """Return a socket for rank 0's TCPStore that only this machine reaches, if `host` is a loopback address: by itself the store listens on
    every address. None for another host, which may be a name that leads here from outside, and if the port is taken."""
    if not _is_loopback(host, port):
        return None
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(socket.SOMAXCONN)
        return server.detach()
    return None


def _is_loopback(host: str, port: int) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in addresses)
    return False


def meet(store: torch.distributed.Store, rank: int, world_size: int, timeout: timedelta) -> torch.distributed.Store:
    """Return a new, empty part of `store`: torchrun keeps its store when it restarts a job, with stale addresses of the last attempt.
    (torchrun's restart count cannot separate attempts, because each machine has its own.)

    Every other rank sends rank 0 a request with a unique key, which no earlier rank 0 is alive to answer.

    Raises:
        RuntimeError: if not all ranks connected in time.
    """
    own_id = uuid.uuid4().hex
    if rank:
        store.set(f"ask/{rank}", own_id)
        store.wait([f"answer/{own_id}"], timeout)
        part = store.get(f"answer/{own_id}").decode()
        store.add(f"came/{part}", 1)
        return torch.distributed.PrefixStore(part, store)
    answered: dict[int, bytes] = {}
    end = time.monotonic() + timeout.total_seconds()
    while (came := store.add(f"came/{own_id}", 0)) < world_size - 1:
        if time.monotonic() > end:
            raise RuntimeError(f"only {came + 1} of {world_size} processes started within {timeout.total_seconds():.0f} s")
        for other in range(1, world_size):
            if store.check([f"ask/{other}"]) and answered.get(other) != (asked := store.get(f"ask/{other}")):
                store.set(f"answer/{asked.decode()}", own_id)
                answered[other] = asked
        time.sleep(0.05)
    return torch.distributed.PrefixStore(own_id, store)
