"""The check before training: it passes where all is well, and names rank and host of what is not."""

import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed

from helpers import dist
from megatron.lm.errors import RunStopped
from megatron.lm.processes.environment import LaunchEnvironment
from megatron.lm.tools import check_cluster
from megatron.lm.tools.check_cluster import Board, DeviceReport, Summed

ROOT = Path(__file__).resolve().parents[4]
CPU = torch.device("cpu")
ALONE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)


# One process


def test_one_process_is_well(capsys: pytest.CaptureFixture[str]):
    assert check_cluster.main([]) == 0
    assert capsys.readouterr().out == "1 processes on 1 machines: all is well\n"


def test_the_known_product_is_exact_in_bf16_however_it_is_added_up():
    left, right, product = check_cluster.operands(64)
    assert left.abs().sum(1).max() <= 512
    assert set(left.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert product.abs().max() <= 256  # integers that BF16 has
    assert torch.equal(product.long(), left.long() @ right.long().t())
    assert torch.equal(left.to(torch.float8_e4m3fn).float(), left)


@pytest.mark.promise("Clusters", "The check names rank and host of a GPU that computes wrong products.")
@pytest.mark.parametrize("kind", ["BF16", "FP8"])
def test_a_product_that_is_wrong_in_one_element_is_named(kind: str, monkeypatch: pytest.MonkeyPatch):
    honest = check_cluster.wrong_products
    calls: list[int] = []

    def faulty(device: torch.device, multiply: Callable[[], torch.Tensor], expected: torch.Tensor, times: int) -> int:
        calls.append(1)
        bad = len(calls) == ("BF16", "FP8").index(kind) + 1

        def once() -> torch.Tensor:
            found = multiply().clone()
            found[3, 5] += bad
            return found

        return honest(device, once, expected, times)

    monkeypatch.setattr(check_cluster, "wrong_products", faulty)
    problem, _ = check_cluster.local_problem(CPU, 8.0, 0.0)
    assert problem is not None
    assert problem.startswith(f"2 elements of 2 known {kind} products")
    assert problem.endswith("are wrong: take the GPU out of service")


def test_memory_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]):
    assert check_cluster.main(["--min-free-gib", "1000000"]) == 1
    said = capsys.readouterr().err
    assert f"rank 0 ({socket.gethostname()}): " in said
    assert "GiB are free, less than --min-free-gib 1e+06: stop other programs on it" in said


def test_what_the_driver_raises_is_a_problem_of_its_rank(monkeypatch: pytest.MonkeyPatch):
    def broken(size: int) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nstack")

    monkeypatch.setattr(check_cluster, "operands", broken)
    _, found = check_cluster.look(LaunchEnvironment(), None)
    assert found.problem == "RuntimeError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize("flags", [["--timeout-seconds", "0"], ["--min-free-gib", "-1"], ["--hosts", ""], ["--slow-percent", "x"]])
def test_bad_flags_are_refused(flags: list[str]):
    with pytest.raises(SystemExit) as refused:
        check_cluster.main(flags)
    assert refused.value.code == 2


def test_an_address_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_cluster.main([]) == 2
    assert "MASTER_ADDR is '' and MASTER_PORT '': give the host and a free port of rank 0" in capsys.readouterr().err


# Which ranks are compared, and which add up together


def test_slow_ranks_are_those_far_above_the_median():
    seconds = {0: 1.0, 1: 1.1, 2: 0.9, 3: 1.7}
    assert check_cluster.slow(seconds, 1.5) == {3: "takes 1.6 times as long as the median"}
    assert check_cluster.slow(seconds, 0.0) == {}
    assert check_cluster.slow({}, 1.5) == {}


@pytest.mark.parametrize("machines", range(1, 8))
@pytest.mark.parametrize("gpus", [1, 2])
def test_stages_take_every_machine_and_every_neighbour_once(machines: int, gpus: int):
    hosts = [f"host{machine}" for machine in range(machines) for _ in range(gpus)]
    found = check_cluster.stages(hosts)
    for _, groups in found:
        members = list(itertools.chain(*groups))
        assert len(members) == len(set(members)), "a rank is in one group at a time"
        assert all(len(group) > 1 and group == sorted(group) for group in groups)
    by_name: dict[str, list[list[int]]] = {}
    for name, groups in found:
        by_name.setdefault(name, []).extend(groups)
    assert len(by_name.get("inside a machine", [])) == (machines if gpus > 1 else 0)
    ring = {frozenset((hosts[a], hosts[b])) for a, b in by_name.get("between neighbouring machines", [])}
    wanted = {frozenset((f"host{m}", f"host{(m + 1) % machines}")) for m in range(machines)} if machines > 1 else set()
    assert ring == wanted
    assert by_name.get("over all ranks", []) == ([list(range(len(hosts)))] if len(hosts) > 1 else [])


# Verdicts of rank 0, on a store of this process


def board(ranks: int, limit: float = 0.2, hosts: list[str] | None = None) -> list[Board]:
    store = torch.distributed.HashStore()
    return [
        Board(store, LaunchEnvironment(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks), limit, hosts or [])
        for rank in range(ranks)
    ]


def test_ranks_that_do_not_come_are_named_by_the_hosts_that_were_expected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_cluster, "RESPONSE_SECONDS", 0.1)
    boards = board(4, hosts=["first", "second"])
    boards[1].say("device", vars(DeviceReport("first", None, 1.0, 1.0)))
    with pytest.raises(RunStopped, match=r"rank 2 \(second\), rank 3 \(second\) did not report within 0\.2 s"):
        check_cluster.check_devices(boards[0], DeviceReport("first", None, 1.0, 1.0), 0.0)
    with pytest.raises(RunStopped, match=r"rank 2 \(second\)"):  # the others hear the same
        boards[1].agree("devices", lambda: None)


def test_all_problems_are_told_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_cluster, "RESPONSE_SECONDS", 0.1)
    boards = board(4)
    for rank, (problem, seconds) in {1: ("bad", 0.0), 2: (None, 1.0), 3: (None, 9.0)}.items():
        boards[rank].say("device", vars(DeviceReport(f"h{rank}", problem, seconds, 1.0)))
    with pytest.raises(RunStopped) as stopped:
        check_cluster.check_devices(boards[0], DeviceReport("h0", None, 1.0, 1.0), 1.5)
    assert str(stopped.value) == "rank 1 (h1): bad; rank 3 (h3): its product takes 9.0 times as long as the median"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({0: Summed(None, 1.0, 5.0), 1: Summed(None, 1.0, 5.0)}, None),
        ({0: Summed(None, 1.0, 5.0)}, "sums here: rank 1 (h1) do not answer: they have died or are stopped"),
        ({0: Summed(None, 1.0), 1: Summed("no answer within 1 s")}, "sums here: rank 0 (h0), rank 1 (h1): no answer within 1 s"),
    ],
)
def test_a_group_is_named_with_its_members(words: dict[int, Summed], wanted: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_cluster, "RESPONSE_SECONDS", 0.1)
    boards = board(2)
    boards[0].hosts = {0: "h0", 1: "h1"}
    for rank, word in words.items():
        boards[rank].say("stage", vars(word))
    assert check_cluster._judge_sums(boards[0], "stage", "here", [[0, 1]], {}, 0.0) == wanted


def test_a_slow_link_is_told_beside_others():
    boards = board(6)
    boards[0].hosts = {rank: f"h{rank}" for rank in range(6)}
    for rank in range(6):
        boards[rank].say("stage", vars(Summed(None, 4.0 if rank > 3 else 1.0, 5.0)))
    groups = [[0, 1], [2, 3], [4, 5]]
    assert check_cluster._judge_sums(boards[0], "stage", "here", groups, {}, 1.5) == (
        "sums here: rank 4 (h4), rank 5 (h5): takes 4.0 times as long as the median"
    )


def test_without_a_verdict_no_rank_waits_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_cluster, "RESPONSE_SECONDS", 0.1)
    with pytest.raises(RunStopped, match=r"rank 0 gives no verdict \(devices\): it has died or is stopped"):
        board(2, limit=0.1)[1].agree("devices", lambda: None)


# Sums


@pytest.mark.promise("Clusters", "The check does not wait for a collective that hangs.")
def test_a_sum_that_hangs_is_not_waited_for():
    held = threading.Event()

    def hang() -> Summed:
        held.wait(60)
        return Summed(None)

    assert check_cluster.within(0.1, hang).problem == "no answer within 0.1 s"
    held.set()


def test_what_a_collective_raises_is_a_problem():
    def fails() -> Summed:
        raise RuntimeError("Connection closed by peer\nstack")

    assert check_cluster.within(10, fails) == Summed("Connection closed by peer")


def test_sums_are_known_and_a_wrong_one_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def two(change: Callable[[torch.Tensor], None]) -> list[Summed]:
        """Both ranks in one process: the collective is played by its result, 1 and 2 times the same numbers."""

        def all_reduce(x: torch.Tensor) -> None:
            if x[1] == 1.0:  # rank 0's, before the sum
                x *= 3
            change(x)

        monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
        monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
        return [check_cluster.add_up(CPU, torch.distributed.HashStore(), [4, 7], 4, 1.0)]

    (well,) = two(lambda x: None)
    assert well.problem is None
    assert well.bandwidth == pytest.approx(4 * check_cluster.SUMMED["cpu"] / well.seconds / 1e9)  # 2 (n - 1) / n is 1
    (wrong,) = two(lambda x: x[7].add_(1))
    assert wrong.problem == f"1 of {check_cluster.SUMMED['cpu']} elements of a known sum are wrong"


# Processes


def start(ranks: int, come: list[int], limit: int, *flags: str, kill: int | None = None) -> list[subprocess.CompletedProcess[str]]:
    """Of `ranks`, those that `come`, as processes of their own; `kill`: one that ends before its first sum."""
    port = dist.free_port()
    kept = {name: value for name, value in os.environ.items() if name not in ALONE}
    ours = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    main = "from megatron.lm.tools import check_cluster as c; import os, sys; "
    dies = "c.add_up = lambda *a: os._exit(9); "
    started = [
        subprocess.Popen(
            [sys.executable, "-c", f"{main}{dies if rank == kill else ''}sys.exit(c.main())", "--timeout-seconds", str(limit), *flags],
            env=kept | ours | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in come
    ]
    return [subprocess.CompletedProcess(one.args, one.wait(), *one.communicate(timeout=200)) for one in started]


@pytest.mark.nightly(7)
def test_three_processes_add_up_over_gloo():
    done = start(3, [0, 1, 2], 60)
    assert [one.returncode for one in done] == [0, 0, 0], done[0].stderr
    assert [one.stdout for one in done[1:]] == ["", ""]
    first, second, last = done[0].stdout.splitlines()
    assert first.startswith("sums inside a machine: at least ")
    assert second.startswith("sums over all ranks: at least ")
    assert last == "3 processes on 1 machines: all is well"


@pytest.mark.nightly(60)
def test_a_process_that_dies_in_a_sum_is_named_and_all_end():
    done = start(3, [0, 1, 2], 15, kill=1)
    assert [one.returncode for one in done] == [1, 9, 1]
    host = socket.gethostname()
    for rank in (0, 2):
        assert f"sums inside a machine: rank 1 ({host}) do not answer: they have died or are stopped" in done[rank].stderr


@pytest.mark.nightly(60)
def test_a_process_that_does_not_come_is_named_and_all_end():
    done = start(3, [0, 2], 15, "--hosts", "one", "two", "three")
    assert [one.returncode for one in done] == [1, 1]
    assert "error: rank 1 (two) did not report within 15 s" in done[0].stderr
    assert "error on rank 2: rank 1 (two) did not report within 15 s" in done[1].stderr


@pytest.mark.gpu
def test_a_gpu_is_well(capsys: pytest.CaptureFixture[str]):
    assert check_cluster.main(["--min-free-gib", "1"]) == 0


def test_the_store_of_torchrun_is_met_anew(monkeypatch: pytest.MonkeyPatch):
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("devices", "an old verdict")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    found = check_cluster.open_board(LaunchEnvironment(), 10.0, [])
    assert not found.store.check(["devices"])
    found.store.set_timeout(timedelta(seconds=5))
    found.agree("devices", lambda: None)
