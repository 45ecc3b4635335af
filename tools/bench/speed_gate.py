"""Check on one GPU that nothing became slower: six ratios of step times, compared with the committed ones.

    make bench-gate                                                     exit code 1 if a ratio lost more than 3 %
    make bench-gate ARGS='--cases trainer-O2 linear'                    some cases
    make bench-gate ARGS='--write'                                      record the ratios of this GPU instead of judging them

A ratio is the time of msamp's step over that of a baseline's step, so less is better. Both sides of a case are processes that take turns on
the same GPU: in a round each takes --steps steps while the other waits, and the ratio is the median over the rounds of the ratio of the
medians within a round. Clocks and temperatures therefore act on both sides, and ratios are comparable between days; absolute times are not.
Ratios depend on the GPU, so that `tools/bench/results/speed_gate.csv` has a line per GPU and case, and a GPU without lines is refused.

The trainer's model has the width of GPT-1.3B, 12 of its layers, and micro-batch 4; its steps replay CUDA graphs. The two lines are
`bench_own_loop.py`'s 350m, a Llama of transformers, each side in its fastest mode. torchao (pip install torchao) is the baseline of one
case. `linear` is one layer of 8192 x 8192 with its casts, forward and backward.
"""

import argparse
import contextlib
import csv
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.lm.build import build_training
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count
from megatron.lm.step import train_step
from tools.bench import bench_kernels, bench_own_loop, rows, training_steps

COLUMNS = ("date", "commit", "gpu", "driver", "torch", "case", "ours", "baseline", "ratio", "least", "most", "ms", "ms_baseline", "rounds")
TOLERANCE = 0.03  # how much a ratio may grow, relative
# Without --fp8-min-gain 0 a contestant would time its layers while the other one builds, and keep these times for real trainings.
TRAINER = "--preset 1.3b --micro-batch-size 4 --flags='--num-layers=12 --fp8-min-gain=0'"


# Name of a ratio -> ours and its baseline, as `serve` reads them: a kind and its own words.
CASES = {
    "trainer-O2": ("trainer O2", "trainer O0"),
    "trainer-O3": ("trainer O3", "trainer O0"),
    "trainer-coat": ("trainer coat", "trainer O0"),
    "two-lines": ("two-lines msamp captured", "two-lines torch compiled"),
    "two-lines-torchao": ("two-lines msamp captured", "two-lines torchao captured"),
    "linear": ("linear fp8", "linear bf16"),
}
Step = Callable[[], Any]


class Measured(NamedTuple):
    """The measured ratio of a case: the median over the rounds, its extremes, and the median times in ms."""

    ratio: float
    least: float
    most: float
    ms: float
    ms_baseline: float


# --- contestants: processes that take steps when asked ----------------------------------------------------------------------------


def serve(contestant: str, options: argparse.Namespace) -> None:
    """Run as the process of a contestant: build it at the first line of stdin, then take as many steps as each line requests; end of file
    ends it."""
    if not sys.stdin.readline():
        return
    kind, _, words = contestant.partition(" ")
    cuda = torch.cuda.is_available()
    with contextlib.redirect_stdout(sys.stderr):  # the lines of JSON are the only output
        step, captured = {"trainer": trainer, "two-lines": two_lines, "linear": linear}[kind](words, options)
        for _ in range(options.warm_up):
            step()
        if kind == "trainer" and cuda:
            torch.cuda.empty_cache()  # memory of the eager steps is for the other contestants
    print(json.dumps({"captured": captured, "gib": torch.cuda.memory_reserved() / 2**30 if cuda else 0.0}), flush=True)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            times, _ = training_steps.synchronized_step_times(step, int(line))
        print(json.dumps([1e3 * seconds for seconds in times]), flush=True)


def trainer(case: str, options: argparse.Namespace) -> tuple[Step, bool]:
    """Return a step of the trainer at a precision with flags, and whether it replays a graph."""
    flags = training_steps.parser(None, "step.csv").parse_args(shlex.split(options.trainer_flags))
    config = training_steps.configuration(case, flags)
    process_groups.initialize(config)
    training = build_training(config, flags.vocab_size)
    batches = training_steps.random_batches(config, flags.vocab_size, process_groups.device())
    graphs = step_graph.build(training)
    return functools.partial(train_step, training, batches, graphs), graphs is not None and graphs.mode == "step"


def two_lines(case: str, options: argparse.Namespace) -> tuple[Step, bool]:
    """Return a step of `bench_own_loop.py`'s model at O3 with BF16 weights, and whether it replays a graph."""
    system, way = case.split()
    shape = bench_own_loop.SHAPES[options.two_lines_shape]
    settings = {"fp8_min_gain": 0} if system == "msamp" else {}  # as in TRAINER
    return bench_own_loop.loop_step(shape, system, "bf16", way, "O3", "", **settings), way == "captured"


def linear(precision: str, options: argparse.Namespace) -> tuple[Step, bool]:
    """Return ten times forward and backward of one linear layer with its casts, `fp8` or `bf16`, in a graph, so that the host's
    share vanishes."""
    run = bench_kernels.linear_step(options.linear_tokens, options.linear_width, fp8=precision == "fp8")

    def ten() -> None:
        for _ in range(10):
            run()

    return (bench_kernels.captured(ten), True) if torch.cuda.is_available() else (run, False)


class Contestant:
    """The process of a contestant, which answers each line of its stdin by a line of JSON."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        passed_on = ("warm_up", "trainer_flags", "two_lines_shape", "linear_tokens", "linear_width")
        words = [f"--{flag.replace('_', '-')}={getattr(options, flag)}" for flag in passed_on]
        path = os.pathsep.join([str(rows.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words, "--serve", name],
            cwd=rows.ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def build(self) -> None:
        """Build, warm up, and print how the steps run."""
        ready = self._ask("")
        print(f"{self.name}: {'replayed graphs' if ready['captured'] else 'eager steps'}, {ready['gib']:.1f} GiB", flush=True)

    def steps(self, number: int) -> list[float]:
        """Take steps and return the ms of each."""
        return self._ask(str(number))

    def _ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            raise ValueError(f"{self.name!r} ended with {self.process.wait()}: its error is above; give fewer cases if memory ran out")
        return json.loads(answer)

    def close(self) -> None:
        """End the process, which holds its memory until then."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# --- ratios ------------------------------------------------------------------------------------------------------------------------


def ratio(ours: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> Measured:
    """Return the ratio of times in ms, given by round."""
    medians = [(statistics.median(own), statistics.median(other)) for own, other in zip(ours, baseline, strict=True)]
    ratios = [own / other for own, other in medians]
    middle = [statistics.median(column) for column in zip(*medians, strict=True)]
    return Measured(statistics.median(ratios), min(ratios), max(ratios), middle[0], middle[1])


def measure(
    cases: Mapping[str, tuple[str, str]],
    options: argparse.Namespace,
    keep: Callable[[str, Measured], None] = lambda name, ratios: None,
) -> dict[str, Measured]:
    """Measure each case, and print it. A contestant lives for as long as a later case needs it.

    All processes start, and import, at once. The two of a case compile and capture at once too, and only then does either take a step that
    counts. `keep` gets each case as soon as it is measured.
    """
    measured: dict[str, Measured] = {}
    alive: dict[str, Contestant] = {}
    built: set[str] = set()
    try:
        for name in dict.fromkeys(name for pair in cases.values() for name in reversed(pair)):
            alive[name] = Contestant(name, options)
        for case, (ours, baseline) in cases.items():
            new = [name for name in (baseline, ours) if name not in built]
            with ThreadPoolExecutor(len(new) or 1) as threads:
                list(threads.map(lambda name: alive[name].build(), new))
            built.update(new)
            turns: dict[str, list[list[float]]] = {baseline: [], ours: []}
            for turn in range(options.rounds):
                for name in list(turns) if turn % 2 == 0 else reversed(turns):  # every round begins with another one
                    turns[name].append(alive[name].steps(options.steps))
            measured[case] = ratio(turns[ours], turns[baseline])
            print(f"{case}: {ours} / {baseline} = {measured[case].ratio:.4f}", flush=True)
            keep(case, measured[case])
            needed = {name for later, pair in cases.items() if later not in measured for name in pair}
            for name in alive.keys() - needed:
                alive.pop(name).close()
    finally:
        for contestant in alive.values():
            contestant.close()
    return measured


def committed(path: Path, gpu: str, names: Iterable[str]) -> dict[str, float]:
    """Return the ratio of each case that the file has for this GPU, the last one if it has several.

    Raises:
        ValueError: there is no file, or it has no valid ratio of a case for this GPU.
    """
    write = "measure them on a tree that you trust: make bench-gate ARGS=--write"
    if not path.is_file():
        raise ValueError(f"{path} does not exist, so there are no ratios to compare with: {write}")
    with path.open(encoding="utf-8", newline="") as stream:
        lines = [line for line in csv.DictReader(stream) if line["gpu"] == gpu]
    ratios = {}
    for name in names:
        texts = [line["ratio"] for line in lines if line["case"] == name]
        try:
            value = float(texts[-1])
        except (IndexError, ValueError):
            raise ValueError(f"{path} has no ratio of case {name} for {gpu}: {write}") from None
        if not 0 < value < float("inf"):
            raise ValueError(f"{path} has ratio {texts[-1]} of case {name} for {gpu}, expected a positive number: {write}")
        ratios[name] = value
    return ratios


def judge(measured: Mapping[str, Measured], expected: Mapping[str, float]) -> list[str]:
    """Return a line for each case whose ratio grew by more than `TOLERANCE`; an empty list if none did."""
    lines = []
    for name, ratios in measured.items():
        change = ratios.ratio / expected[name] - 1
        if not change <= TOLERANCE:  # a ratio that is NaN fails too
            lines.append(
                f"{name}: ratio {ratios.ratio:.4f} ({ratios.least:.4f} to {ratios.most:.4f}), committed {expected[name]:.4f}: "
                f"{100 * change:+.1f} %, more than {100 * TOLERANCE:g} %"
            )
    return lines


def row_of(case: str, ratios: Measured, where: Mapping[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the row to write; `where`: machine and tree."""
    ours, baseline = CASES[case]
    row = dict(where) | {"case": case, "ours": ours, "baseline": baseline, "rounds": options.rounds}
    row |= {key: round(value, 4) for key, value in ratios._asdict().items()}
    return {column: row[column] for column in COLUMNS}


def require(cases: Mapping[str, tuple[str, str]]) -> None:
    """Raise a ValueError if this machine lacks what the cases need."""
    if not torch.cuda.is_available():
        raise ValueError("the speed gate measures on a GPU, and torch finds none (CUDA_VISIBLE_DEVICES?): run it on a machine with one")
    if torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(f"the speed gate measures FP8, which {torch.cuda.get_device_name()} does not have: use Ada, Hopper or later")
    needing = [case for case, (_, baseline) in cases.items() if "torchao" in baseline]
    line = [sys.executable, "-c", "import torchao.float8"]
    if needing and subprocess.run(line, capture_output=True, check=False).returncode:
        raise ValueError(f"case {needing[0]} requires torchao, which cannot be imported: pip install torchao, or name the other --cases")


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge; return 1 if a case lost, else the codes of `megatron.lm.shell.exit_codes`."""
    parser = Parser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=count(1), default=8)
    parser.add_argument("--steps", type=count(2), default=10, help="of each side in a round")
    parser.add_argument("--warm-up", type=count(0), default=training_steps.WARM_UP, help="steps before the first round")
    parser.add_argument("--write", action="store_true", help="append the ratios to --csv instead of judging them")
    rows.add_flags(parser, "speed_gate.csv", help="file of the committed ratios (default: %(default)s)")
    parser.add_argument("--trainer-flags", default=TRAINER, help="model of the trainer's cases, as flags of bench_step.py")
    parser.add_argument("--two-lines-shape", choices=bench_own_loop.SHAPES, default="350m")
    parser.add_argument("--linear-tokens", type=count(1), default=8192)
    parser.add_argument("--linear-width", type=count(16), default=8192)
    parser.add_argument("--serve", metavar="CONTESTANT", help="run as the process of a contestant; started by other processes")
    options = parser.parse_args(argv)
    if options.serve is not None:
        serve(options.serve, options)
        return 0
    cases = {case: pair for case, pair in CASES.items() if case in options.cases}
    require(cases)
    if options.write:
        where = rows.machine(options.commit)  # once: the first row changes a tree that has the file
        written = measure(cases, options, lambda name, ratios: rows.append(options.csv, [row_of(name, ratios, where, options)]))
        print(f"{len(written)} ratios written to {options.csv}: commit it")
        return 0
    expected = committed(options.csv, torch.cuda.get_device_name(), cases)
    measured = measure(cases, options)
    lost = judge(measured, expected)
    for name, ratios in measured.items():
        print(f"{name}: {100 * (ratios.ratio / expected[name] - 1):+.1f} % of the committed ratio {expected[name]:.4f}")
    print("\n".join(f"LOST {line}" for line in lost) or f"no case lost more than {100 * TOLERANCE:g} %", flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
