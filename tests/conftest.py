"""Where tests run: on the CPU (Triton kernels under the interpreter), and, marked `gpu`, on a GPU with FP8."""

import atexit
import gc
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from helpers import hosts, interpreter, rewritten, shards
from helpers.megatron_jobs import UNCOMPILED
from msamp.comm import exchange
from msamp.nn import layer_gains
from msamp.numerics import recipe
from msamp.optim import updates

# Until all is imported and collected, of which nothing is garbage: 2 of the 11 s of CPU time that each process of a run takes for it.
gc.disable()

TESTS = Path(__file__).parent
CASES = pytest.StashKey[int]()

# Triton reads this when it is first imported, and kernels are made for one or the other when their file is. Not in a hook: where single
# files are named on the command line, the conftests beside them are imported first, and one of them imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell without job control starts what it puts in the background with interrupts ignored, and children inherit that: tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", default="1/1", metavar="I/N", help="of the tests that are left, the files of part I of N, of about equal time"
    )
    parser.addoption("--extras", action="store_true", help="only the tests that ask for a package of an extra other than dev")


def pytest_sessionstart(session: pytest.Session) -> None:
    if [Path(path).resolve() for path in session.config.args] == [TESTS]:  # all of them, in several processes
        rewritten.keep(rewritten.part(session.config, TESTS), session.config)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.config.stash[CASES] = item.config.stash.get(CASES, 0) + 1


@pytest.hookimpl(trylast=True)  # after -m and -k, so that what is left is shared out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--extras"):
        config.hook.pytest_deselected(items=[item for item in items if not hosts.asks_for_an_extra(item)])
        items[:] = [item for item in items if hosts.asks_for_an_extra(item)]
    others = shards.outside(items, *shards.part(config.getoption("--shard")))
    config.hook.pytest_deselected(items=[item for item in items if shards.file_of(item) in others])
    items[:] = [item for item in items if shards.file_of(item) not in others]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU with FP8 (compute capability 8.9 or later)")
    for item in items:
        if "gpu" in item.keywords or "multi_gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # The trainer collects garbage after each run, and in tests that have imported all of it each time took 0.3 s of a run's half second.
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_looked_at_again() -> Iterator[None]:
    """What a file of tests has imported and keeps is frozen too: late in a run a collection took 1.2 s for each test that trains."""
    yield
    gc.collect()
    gc.freeze()


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """The name of a test that fails and the first line of its error, at once: the list at the end is lost where a run is cut off. Of one
    that passes on several GPUs how long it had them, without the time for which it waited."""
    if report.passed and (times := re.findall(r"\d+ s on the cards", report.capstdout)):
        return "passed", ".", f"PASSED ({', '.join(times)})"
    if not report.failed or not isinstance(report, pytest.TestReport):
        return None
    category, letter = ("failed", "F") if report.when == "call" else ("error", "E")
    crash = getattr(report.longrepr, "reprcrash", None)
    first = crash.message.split("\n", 1)[0][:300] if crash is not None else ""
    return category, f"{letter} {report.nodeid}: {first}\n", category.upper()


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # to free what was imported and collected took 4 of the 11 s of an empty run's CPU time
        atexit.register(os._exit, 0)
    else:
        gc.unfreeze()  # so that extension modules find their objects gone


@pytest.fixture(scope="session", autouse=True)
def small_layers_stay_in_fp8() -> Iterator[None]:
    """On a GPU: linear layers as small as those of tests gain nothing, and would compute in BF16 from their second step on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_gains, "default_measure", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def groups_go_in_a_thread() -> Iterator[None]:
    """Process groups over gloo are freed beside the tests: each waits for a thread of its own, the 18 of a trainer 0.13 s.

    With it a start and end of a trainer's groups took 0.02 s where it took 0.145, on 2 cores.
    """
    if torch.cuda.is_available():
        yield
        return
    destroy = torch.distributed.destroy_process_group

    def destroy_later(group: torch.distributed.ProcessGroup | None = None) -> None:
        held = list(torch.distributed.distributed_c10d._world.pg_map) if group is None else [group]
        destroy(group)
        threading.Thread(target=held.clear, name="groups that go").start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "destroy_process_group", destroy_later)
        yield


@pytest.fixture
def cases_collected(request: pytest.FixtureRequest) -> int:
    """Number of cases in the files that this run collected, those that -m, -k or --shard left out included."""
    return request.config.stash[CASES]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and a GPU in tests marked `gpu`."""
    return torch.device(request.param)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a Triton kernel runs: the CPU under the interpreter, and a GPU in tests marked `gpu`.

    The interpreter shows indices, masks and FP32 arithmetic. It cannot show a cast to FP8 by hardware, since its own is wrong (Triton 3.9:
    inf and 1024 become 256, NaN 384, 1.97 becomes 1.0 without rounding to even): kernels encode by integers there, and only `gpu` tests
    reach the conversion instructions. Neither can it show the accumulator of `tl.dot`, which is FP32 there, nor races between programs.
    """
    pytest.importorskip("triton")
    if (request.param == "interpreter") != _interpreting():
        pytest.skip(
            "Triton is set to compile; TRITON_INTERPRET=1 interprets" if request.param == "interpreter" else "TRITON_INTERPRET=1 is set"
        )
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    with pytest.MonkeyPatch.context() as patch:
        interpreter.interpret_faster(patch)
        yield torch.device("cpu")


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a test registers in this process is known to no other test."""
    tables: list[dict[str, Any]] = [recipe._TABLE, updates._KNOWN, exchange._EXCHANGES]
    before = [dict(table) for table in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        if table != known:
            table.clear()
            table.update(known)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts import megatron-core without torch's compiler, for which it decorates functions: 1.3 s less each."""
    for name, value in UNCOMPILED.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def one_process() -> Iterator[None]:
    """The trainer's process groups, device and seeds of a run on one process; on a CPU, in the CPU home."""
    from helpers import tiny  # imports the trainer, which tests of msamp do without

    with tiny.started(tiny.config("corpus")):
        yield
