"""Check in a minute, before training, that a job's GPUs compute correctly, have free memory and reach each other; name rank and host of a
fault.

    torchrun --nproc-per-node 8 -m megatron.lm.tools.check_cluster

It is started like the trainer, with one process per GPU and with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Every process
multiplies matrices of small integers in BF16 and in FP8, with products known to the bit, and checks the free memory of its GPU. Then the
processes run all-reduces: inside each machine, between neighbours, and over all ranks, each within `--timeout-seconds`. The exit code is 0
if all is well, else 1 on every process. Without a GPU the checks run over gloo, with the FP8 product on dequantized values.
"""

import itertools
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.lm.errors import RunStopped
from megatron.lm.processes import rendezvous
from megatron.lm.processes.environment import LaunchEnvironment, launch_from_environment
from megatron.lm.shell import arguments, exit_codes
from msamp.kernels.scaled_mm import fp8_hardware, scaled_mm

LARGEST = 1  # of the integers: every partial sum is then exact in BF16, and in the 13 bits that FP8 tensor cores keep
DEPTH = 512
SIZE = {"cuda": 4096, "cpu": 128}  # of the square product
PRODUCTS = {"cuda": 200, "cpu": 2}
SUMMED = {"cuda": 2**25, "cpu": 2**16}  # FP32 elements of a sum
RESPONSE_SECONDS = 10.0  # after a limit, for the verdict to reach all
FREE_SHARE = 0.9  # of a GPU's memory, before anything runs on it
HANGING = "sum"  # name of the thread that waits for others


@dataclass(frozen=True)
class DeviceReport:
    """What a process reports about its own GPU: `problem` as text or None, time of a BF16 product (s), free memory (GiB)."""

    host: str
    problem: str | None
    seconds: float
    free_gib: float


def operands(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices of integers up to `LARGEST`, [size, DEPTH] FP32, and the exact product of one and the other's transpose, FP32."""
    draw = torch.Generator().manual_seed(7)
    left, right = (torch.randint(-LARGEST, LARGEST + 1, (size, DEPTH), generator=draw).float() for _ in range(2))
    return left, right, left @ right.t()


def wrong_products(device: torch.device, multiply: Callable[[], torch.Tensor], expected: torch.Tensor, times: int) -> int:
    """Count the elements of `times` products that differ from `expected` [n, n]; waits for the device."""
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(times):
        wrong += (multiply() != expected).sum()
    return int(wrong)


def local_problem(device: torch.device, free_gib: float, least_free_gib: float) -> tuple[str | None, float]:
    """Return the problem with this process's device, or None, and the seconds of one BF16 product."""
    if free_gib < least_free_gib:
        return f"{free_gib:.1f} GiB are free, less than --min-free-gib {least_free_gib:g}: stop other programs on it", 0.0
    left, right, product = (x.to(device) for x in operands(SIZE[device.type]))
    one = torch.ones((), device=device)
    a, b, a8, b8 = left.bfloat16(), right.bfloat16(), left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    expected = product.bfloat16()
    for kind, multiply in (
        ("BF16", lambda: a @ b.t()),
        ("FP8", lambda: scaled_mm(a8, b8, one, one, None, torch.bfloat16, fast_accum=False)),
    ):
        wrong = wrong_products(device, multiply, expected, PRODUCTS[device.type])
        if wrong:
            emulated = "" if kind == "BF16" or fp8_hardware(device) else " (emulated)"
            return (
                f"{wrong} elements of {PRODUCTS[device.type]} known {kind} products{emulated} are wrong: take the GPU out of service",
                0.0,
            )
    return None, _seconds(device, lambda: a @ b.t())


def _seconds(device: torch.device, work: Callable[[], object], times: int = 20) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    started = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - started) / times


def look(launch: LaunchEnvironment, least_free_gib: float | None) -> tuple[torch.device, DeviceReport]:
    """Return this process's device and its state; an error of the driver is reported as a problem.

    Args:
        launch: rank and local rank of this process.
        least_free_gib: required free memory; None: `FREE_SHARE` of a GPU's memory.
    """
    host, device = socket.gethostname(), torch.device("cpu")
    try:
        if torch.cuda.is_available():
            if launch.local_rank >= torch.cuda.device_count():
                raise RuntimeError(f"LOCAL_RANK={launch.local_rank}, but there are {torch.cuda.device_count()} GPUs")
            torch.cuda.set_device(launch.local_rank)
            device = torch.device("cuda", launch.local_rank)
            free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        else:
            import psutil

            free, total = psutil.virtual_memory().available / 2**30, 0.0
        problem, seconds = local_problem(device, free, FREE_SHARE * total if least_free_gib is None else least_free_gib)
        return device, DeviceReport(host, problem, seconds, free)
    except RuntimeError as error:
        return device, DeviceReport(host, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", 0.0, 0.0)


def slow(seconds: Mapping[int, float], factor: float) -> dict[int, str]:
    """Return a message for each rank whose time for the same work is more than `factor` times the median; none with factor 0."""
    median = statistics.median(seconds.values()) if seconds else 0.0
    if not factor or not median:
        return {}
    return {rank: f"takes {its / median:.1f} times as long as the median" for rank, its in seconds.items() if its > factor * median}


def stages(hosts: Sequence[str]) -> list[tuple[str, list[list[int]]]]:
    """Return the stages of the link check in order: a name, and the groups of ranks that run an all-reduce. `hosts`: the host of each rank.

    Inside each machine; between the first ranks of neighbouring machines in a ring, even pairs and then odd ones, so that the message names
    both ends of a broken cable; over all ranks.
    """
    members = {host: [rank for rank, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)}
    groups_of = [("inside a machine", [ranks for ranks in members.values() if len(ranks) > 1])]
    first = [ranks[0] for ranks in members.values()]
    pairs = list(itertools.pairwise(first)) + ([(first[-1], first[0])] if len(first) > 2 else [])
    for parity in range(2):
        groups_of.append(("between neighbouring machines", [sorted(pair) for pair in pairs[parity::2]]))
    if len(first) > 2 and len(first) % 2:  # the pair that closes an odd ring shares a machine with the first
        last = groups_of[1][1].pop()
        groups_of.append(("between neighbouring machines", [last]))
    groups_of.append(("over all ranks", [list(range(len(hosts)))] if len(hosts) > 1 else []))
    return [(name, groups) for name, groups in groups_of if groups]


def spoken(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """`rank 3 (gpu-1), rank 5 (gpu-2)`."""
    return ", ".join(f"rank {rank} ({hosts.get(rank, 'host unknown')})" for rank in ranks)


class Board:
    """Messages of the processes, in the store at MASTER_ADDR and MASTER_PORT: under a name, by rank, as JSON.

    Args:
        store: reachable by all processes.
        launch: this process and the others.
        limit: longest wait, in seconds.
        expected: hosts in the order of their ranks, if they are known before the ranks connect.
    """

    def __init__(self, store: dist.Store, launch: LaunchEnvironment, limit: float, expected: Sequence[str]) -> None:
        self.store, self.launch, self.limit = store, launch, limit
        ranks = range(launch.world_size)
        self.hosts = {rank: expected[rank * len(expected) // launch.world_size] for rank in ranks} if expected else {}

    def say(self, name: str, word: Any) -> None:
        """Write a message of this rank."""
        self.store.set(f"{name}/{self.launch.rank}", json.dumps(word))

    def words(self, name: str, ranks: Iterable[int], limit: float | None = None) -> dict[int, Any]:
        """Return the messages of `ranks`; those that write none within the limit are missing."""
        end, waiting, messages = time.monotonic() + (self.limit if limit is None else limit), list(ranks), {}
        while True:
            for rank in [rank for rank in waiting if self.store.check([f"{name}/{rank}"])]:
                messages[rank] = json.loads(self.store.get(f"{name}/{rank}"))
                waiting.remove(rank)
            if not waiting or time.monotonic() > end:
                return messages
            time.sleep(0.02)

    def agree(self, name: str, judge: Callable[[], str | None]) -> None:
        """Let rank 0 judge; all ranks continue if it finds no problem.

        Raises:
            RunStopped: on every rank, with the problem.
        """
        if self.launch.rank == 0:
            self.store.set(name, judge() or "")
        try:
            self.store.wait([name], timedelta(seconds=2 * self.limit + RESPONSE_SECONDS))
        except RuntimeError as error:  # DistError is one
            raise RunStopped(f"rank 0 gives no verdict ({name}): it has died or is stopped") from error
        verdict = self.store.get(name).decode()
        # Rank 0 holds the store and may leave after any verdict: it waits until all have read, or the others would lose the connection.
        self.say(f"{name} read", True)
        if self.launch.rank == 0:
            self.words(f"{name} read", range(self.launch.world_size), RESPONSE_SECONDS)
        if verdict:
            raise RunStopped(verdict)


def open_board(launch: LaunchEnvironment, limit: float, expected: Sequence[str]) -> Board:
    """Open the board of this job. RunStopped if rank 0 cannot be reached within the limit, ValueError without an address."""
    if launch.world_size == 1 and "MASTER_ADDR" not in os.environ:
        return Board(dist.HashStore(), launch, limit, expected)
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"MASTER_ADDR is {host!r} and MASTER_PORT {port!r}: give the host and a free port of rank 0, or start with torchrun"
        )
    with_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = launch.rank == 0 and not with_agent
    try:
        left = timedelta(seconds=limit)
        inside = rendezvous.listener(host, int(port)) if is_master else None
        store: dist.Store = dist.TCPStore(
            host, int(port), is_master=is_master, timeout=left, wait_for_workers=False, master_listen_fd=inside
        )
        if with_agent:  # the launcher's store keeps the messages from before a restart
            store = rendezvous.meet(store, launch.rank, launch.world_size, left)
    except RuntimeError as error:
        why = str(error).strip().partition("\n")[0]
        raise RunStopped(f"{socket.gethostname()} does not reach rank 0 at {host}:{port} within {limit:g} s ({why})") from error
    return Board(store, launch, limit, expected)


def check_devices(board: Board, own: DeviceReport, slow_factor: float) -> list[str]:
    """Collect the device reports of all processes; return the hosts by rank. RunStopped on every rank if one is missing or has a
    problem."""
    board.say("device", vars(own))

    def judge() -> str | None:
        reports = {rank: DeviceReport(**word) for rank, word in board.words("device", range(board.launch.world_size)).items()}
        board.hosts |= {rank: report.host for rank, report in reports.items()}
        missing = [rank for rank in range(board.launch.world_size) if rank not in reports]
        problems = {rank: report.problem for rank, report in reports.items() if report.problem}
        late = slow({rank: report.seconds for rank, report in reports.items() if rank not in problems}, slow_factor)
        problems |= {rank: f"its product {text}" for rank, text in late.items()}
        lines = [f"{spoken([rank], board.hosts)}: {problems[rank]}" for rank in sorted(problems)]
        if missing:
            lines.append(f"{spoken(missing, board.hosts)} did not report within {board.limit:g} s")
        return "; ".join(lines)

    board.agree("devices", judge)
    return [word["host"] for _, word in sorted(board.words("device", range(board.launch.world_size)).items())]


@dataclass(frozen=True)
class Summed:
    """Result of an all-reduce: `problem` as text or None, seconds, and bus bandwidth as nccl-tests defines it (GB/s)."""

    problem: str | None
    seconds: float = 0.0
    bandwidth: float = 0.0


def add_up(device: torch.device, store: dist.Store, group: Sequence[int], rank: int, seconds: float) -> Summed:
    """All-reduce known integers over a group of ranks, in a separate process group."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own
    place, ranks = list(group).index(rank), len(group)
    # Longer than our own limit: the timeout messages of NCCL and gloo name no host.
    timeout = timedelta(seconds=seconds + 6 * RESPONSE_SECONDS)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=place, world_size=ranks, timeout=timeout)
    try:
        base = torch.arange(SUMMED[device.type], device=device).remainder(13).float()
        taken = [base * (place + 1)]
        dist.all_reduce(taken[0])
        wrong = int((taken[0] != base * (ranks * (ranks + 1) // 2)).sum())
        if wrong:
            return Summed(f"{wrong} of {base.numel()} elements of a known sum are wrong")
        once = _seconds(device, lambda: dist.all_reduce(base), 3)
        return Summed(None, once, 2 * (ranks - 1) / ranks * base.numel() * base.element_size() / once / 1e9)
    finally:
        dist.destroy_process_group()


def within(limit: float, work: Callable[[], Summed]) -> Summed:
    """Return the result of `work`, run in a thread: a hanging collective cannot be interrupted."""
    outcome: list[Summed] = []

    def run() -> None:
        try:
            outcome.append(work())
        except RuntimeError as error:
            outcome.append(Summed(str(error).strip().partition("\n")[0]))

    thread = threading.Thread(target=run, name=HANGING, daemon=True)
    thread.start()
    thread.join(limit)
    return outcome[0] if outcome else Summed(f"no answer within {limit:g} s")


def check_links(board: Board, device: torch.device, hosts: Sequence[str], slow_factor: float) -> list[str]:
    """Run the all-reduces of `stages(hosts)`; return a log line for each stage with its slowest group.

    Raises:
        RunStopped: on every rank, with the ranks and hosts of the first stage that fails.
    """
    lines = []
    for number, (name, groups) in enumerate(stages(hosts)):
        rank, key = board.launch.rank, f"stage {number}"
        own = next((group for group in groups if rank in group), None)
        if own is not None:
            store = dist.PrefixStore(f"{key}/{own[0]}", board.store)
            board.say(key, vars(within(board.limit, partial(add_up, device, store, own, rank, board.limit))))
        heard: dict[int, Summed] = {}
        board.agree(key, partial(_judge_sums, board, key, name, groups, heard, slow_factor))
        if heard:
            slowest = min((group for group in groups), key=lambda group: heard[group[0]].bandwidth)
            lines.append(f"sums {name}: at least {heard[slowest[0]].bandwidth:.1f} GB/s ({spoken(slowest[:2], board.hosts)})")
    return lines


def _judge_sums(
    board: Board, key: str, name: str, groups: Sequence[Sequence[int]], heard: dict[int, Summed], slow_factor: float
) -> str | None:
    """Return the problem of a stage, on rank 0; writes the results of its ranks into `heard`."""
    said = board.words(key, itertools.chain(*groups), board.limit + RESPONSE_SECONDS)
    heard |= {rank: Summed(**word) for rank, word in said.items()}
    unresponsive = [rank for group in groups for rank in group if rank not in heard]
    if unresponsive:
        return f"sums {name}: {spoken(unresponsive, board.hosts)} do not answer: they have died or are stopped"
    problems = []
    for group in groups:
        problem = next((heard[rank].problem for rank in group if heard[rank].problem), None)
        if problem:
            problems.append(f"{spoken(group, board.hosts)}: {problem}")
    late = slow({group[0]: heard[group[0]].seconds for group in groups}, slow_factor) if len(groups) > 2 else {}
    problems += [f"{spoken(group, board.hosts)}: {late[group[0]]}" for group in groups if group[0] in late and not problems]
    return f"sums {name}: {'; '.join(problems)}" if problems else None


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("--timeout-seconds", type=arguments.count(1, 3600), default=120, help="longest wait (default: %(default)s)")
    parser.add_argument("--min-free-gib", type=arguments.count(0, 2**20), help="free memory required (default: 90 %% of a GPU's memory)")
    parser.add_argument(
        "--slow-percent",
        type=arguments.count(0, 10_000),
        help="refuse a rank that takes this many percent longer than the median; 0: never (default: 50 on GPUs, 0 elsewhere)",
    )
    parser.add_argument(
        "--hosts", nargs="+", type=arguments.name, default=[], help="hosts in the order of their ranks, to name those that do not connect"
    )
    args = parser.parse_args(argv)
    launch = launch_from_environment()
    device, own = look(launch, args.min_free_gib)
    percent = args.slow_percent if args.slow_percent is not None else 50 if device.type == "cuda" else 0
    factor = 1 + percent / 100 if percent else 0.0
    board = open_board(launch, args.timeout_seconds, args.hosts)
    try:
        hosts = check_devices(board, own, factor)
        lines = check_links(board, device, hosts, factor)
    except RunStopped as problem:
        if not any(thread.name == HANGING for thread in threading.enumerate()):
            raise
        # A normal exit would wait for the hanging thread.
        print(f"error on rank {launch.rank}: {problem}" if launch.rank else f"error: {problem}", file=sys.stderr, flush=True)
        os._exit(exit_codes.STOPPED)
    if launch.rank == 0:
        print(*lines, f"{launch.world_size} processes on {len(set(hosts))} machines: all is well", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
