"""Run a test function on several gloo processes of this machine.

    def allreduce(x):
        y = x.clone()
        torch.distributed.all_reduce(y)
        return y

    def test_allreduce():
        assert dist.run(allreduce, 2, torch.ones(1)) == [2.0, 2.0]

pytest's importlib mode gives test files module names that a new process cannot import, so functions travel as file path +
qualified name and the child loads the file itself.

Without a GPU children fork from a server that has imported torch, the trainer and helpers of tests and done nothing else. A fresh
interpreter took 4 s for that, on every rank of every call (100 s against 32 for 34 tests of tensor and sequence parallelism on 2 cores).
With one they are fresh interpreters: some import asks CUDA what it has, and no fork can use CUDA after that.
"""

import contextlib
import faulthandler
import fcntl
import gc
import importlib.util
import inspect
import io
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from helpers.megatron_jobs import UNCOMPILED

# What nearly every file of tests imports: where each rank imported pytest and these itself, that took 0.1 s of its 0.15.
PRELOADED = ["torch", "torch.distributed", "megatron.lm.run.trainer", "pytest", "helpers.numerics", "helpers.tiny"]
GRACE_SECONDS = 2.0  # after one rank failed, the others get this long to fail by themselves
LATE_SECONDS = 10.0  # after its time a rank gets this long to write its stacks and end
GPU_SECONDS = 90  # of a call of `on_gpus`, cold kernel caches included; its start, before it waits for the cards, has as long
CARDS_LOCK = Path(tempfile.gettempdir(), f"msamp-cards-{os.getuid()}.lock")


def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, init: bool = True, gpus: bool = False) -> list[Any]:
    """Call `fn(*args)` on `world_size` new processes and return their results, rank 0 first.

    fn: a function at the top level of a file; args and results travel by pickle (tensors by value).
    init: join a gloo process group first; False leaves that to `fn`, which finds torchrun's variables in its environment.
    gpus: as `on_gpus`.
    The first rank to fail has its exception raised here, with its traceback as a note; TimeoutError, with the stacks of all ranks, once
    the start of processes, `fn` and their end have taken `timeout` seconds. No process outlives the call.
    """
    path = inspect.getsourcefile(fn)
    if path is None or not fn.__qualname__.isidentifier() or fn.__module__ == "__main__":  # each process would run the script again
        raise ValueError(f"{fn.__qualname__} cannot be found by a new process: move it to the top level of a file that is imported")
    with tempfile.TemporaryDirectory() as folder:
        payload = pickle.dumps(args)
        port = free_port()
        context = _context()
        parent = os.getpid() if context.get_start_method() == "forkserver" else None
        call = _Call(str(Path(path).resolve()), fn.__module__, fn.__qualname__, payload, world_size, folder, port, timeout, init, gpus)
        processes = [context.Process(target=_child, args=(call, rank, dict(os.environ), parent)) for rank in range(world_size)]
        try:
            for process in processes:
                process.start()
            _wait(processes, Path(folder), time.time(), timeout)
            if gpus:
                print(f"{fn.__name__}: {time.time() - Path(folder, 'cards').stat().st_mtime:.0f} s on the cards")
            return [_result(Path(folder), rank) for rank in range(world_size)]
        finally:
            for process in processes:
                _kill(process)


def on_gpus(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`run` over NCCL, a GPU for each rank; of all calls on this machine one at a time has the GPUs, while others start their processes.

    Beside another's, a kernel of NCCL waits on each card for its time slice: tests took about as many times longer as there were of them.
    Starting processes, which imports take most of, needs no GPU; a single process waits for no other, and compiles for most of its time.
    """
    return run(fn, world_size, *args, timeout=GPU_SECONDS, init=False, gpus=True)


def place() -> tuple[int, int]:
    """(rank, ranks); one process has no group."""
    import torch.distributed

    ready = torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if ready else (0, 1)


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls of `on_gpus` whose processes start at the same time. Each needs files of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def _context() -> Any:
    import torch

    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, UNCOMPILED):  # of the server alone: a rank that compiles has the test's own environment
        forkserver.ensure_running()
    return context


def free_port() -> int:
    """A TCP port of this machine that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait(processes: list, folder: Path, start: float, timeout: float) -> None:
    """Return when every process has left with 0; raise the first failure, or TimeoutError if one took too long."""
    limit = math.inf
    while (running := [p for p in processes if p.is_alive()]) and time.time() < min(limit, _latest(folder, start, timeout)):
        if any(p.exitcode for p in processes) or any(folder.glob("error_*.pkl")):  # at its end, one that failed may wait for NCCL
            limit = min(limit, time.time() + GRACE_SECONDS)
        multiprocessing.connection.wait([p.sentinel for p in running], 0.5)
    codes = {rank: p.exitcode for rank, p in enumerate(processes)}
    stacks = {rank: file for rank in codes if (file := folder / f"stacks_{rank}").exists() and file.stat().st_size}
    if any(code and rank not in stacks and not (folder / f"error_{rank}.pkl").exists() for rank, code in codes.items()):
        raise RuntimeError(f"a process died without a Python exception; exit codes by rank: {codes}")
    # The first is the cause: where a rank ends at its time, those that exchange with it fail.
    causes = sorted([*stacks.values(), *folder.glob("error_*.pkl")], key=lambda file: file.stat().st_mtime_ns)
    if causes and causes[0].suffix:
        raise _error(causes[0])
    if late := [rank for rank, code in codes.items() if code is None or rank in stacks]:
        error = TimeoutError(f"ranks {late} were still running after {timeout:g} s")
        for rank, file in stacks.items():
            error.add_note(f"on rank {rank}:\n{file.read_text()}")
        raise error


def _latest(folder: Path, start: float, timeout: float) -> float:
    """When the last process must have ended, as `time.time`: a call that waits for the cards waits for others, which end in time."""
    cards = folder / "cards"
    if not cards.exists() and (folder / "queued").exists():
        return math.inf
    return (cards.stat().st_mtime if cards.exists() else start) + timeout + LATE_SECONDS


def _error(file: Path) -> BaseException:
    rank = file.stem.removeprefix("error_")
    pickled, text = pickle.loads(file.read_bytes())
    try:
        error = pickle.loads(pickled)
    except Exception:  # an exception class that does not survive pickling still has its text
        error = RuntimeError("the exception of a rank could not be pickled")
    error.add_note(f"on rank {rank}:\n{text}")
    return error


def _result(folder: Path, rank: int) -> Any:
    return pickle.loads((folder / f"result_{rank}.pkl").read_bytes())


def _kill(process: Any) -> None:
    """End a process and whatever it started (each child leads its own process group)."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


class _Call(NamedTuple):
    """What all ranks of a call of `run` get; folder: where they leave what they return."""

    path: str
    module: str
    name: str
    payload: bytes
    ranks: int
    folder: str
    port: int
    timeout: float
    init: bool
    gpus: bool


def _child(call: _Call, rank: int, environment: dict[str, str], parent: int | None) -> None:
    os.setsid()
    if parent is not None:  # the server writes to where the test that started it wrote, and this test reads what its own ranks say
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):  # a socket has no such door; then it stays the server's
                os.dup2(os.open(f"/proc/{parent}/fd/{descriptor}", os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()  # the server's: what a test has set since is not in it
    os.environ.update(environment)
    os.environ.update(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(call.ranks),
        LOCAL_WORLD_SIZE=str(call.ranks),
    )
    try:
        result = _call(call, rank)
        Path(call.folder, f"result_{rank}.pkl").write_bytes(pickle.dumps(result))
    except BaseException as error:
        # Written before the process group goes: its end makes the other ranks fail too, and the first file is the cause.
        try:
            pickled = pickle.dumps(error)
        except Exception:  # reported as text instead, see _error
            pickled = b""
        Path(call.folder, f"error_{rank}.pkl").write_bytes(pickle.dumps((pickled, traceback.format_exc())))
        sys.exit(1)
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _call(call: _Call, rank: int) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed

    stacks = Path(call.folder, f"stacks_{rank}").open("w")  # noqa: SIM115 - until the process has ended
    faulthandler.dump_traceback_later(call.timeout, exit=True, file=stacks)
    torch.set_num_threads(1)
    # Under the parent's module name, so that classes of the test file unpickle on both sides.
    spec = importlib.util.spec_from_file_location(call.module, call.path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[call.module] = loaded
    spec.loader.exec_module(loaded)
    gc.freeze()  # as in conftest.py
    if torch.cuda.is_available():  # as in conftest.py
        from msamp.nn import layer_gains

        layer_gains.default_measure = lambda: None
    if call.gpus:
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
            torch.cuda.synchronize()  # its context, which takes no time of the card from others
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        cards = Path(call.folder, "cards")
        faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            Path(call.folder, "queued").touch()
            if call.ranks > 1:
                fcntl.flock(os.open(CARDS_LOCK, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)  # until this process ends
            cards.touch()
        while not cards.exists():
            time.sleep(0.02)
        faulthandler.dump_traceback_later(call.timeout, exit=True, file=stacks)
    if call.init:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{call.folder}/store", rank=rank, world_size=call.ranks, timeout=timedelta(seconds=call.timeout)
        )
        # A rank whose function is short would leave while another is still connecting to it, and fail that one.
        torch.distributed.barrier()
    return getattr(loaded, call.name)(*pickle.loads(call.payload))


def written(state: dict[str, Any]) -> bytes:
    """A file of it: plain pickle, which carries what ranks are given and return, knows no float8."""
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read(file: bytes) -> dict[str, Any]:
    """What `written` wrote."""
    import torch

    return torch.load(io.BytesIO(file), weights_only=True)
