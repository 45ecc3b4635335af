"""Time training steps of several cases and several trees on one GPU, in alternating rounds: how much slower is a change than the tree
before?

    git worktree add ../before 7f90861; git -C ../before checkout 0fe148f -- tools/bench/side_by_side.py
    python tools/bench/side_by_side.py --tree before=../before --cases 'before O2' 'now O2' 'now O2 --moment-rounding stochastic'

A case is the name of a tree (`now` is the tree of this file) and a precision with flags. Each case is a process of its tree's own copy of
this file, which builds the preset, captures its graphs, and then waits. A tree from before 0fe148f has no copy. The first one fits it:
`git -C ../before checkout 0fe148f -- tools/bench/side_by_side.py`.

The cases are built one after the other and hold their memory at once: 1.3B with micro-batch 4 takes some 16 GiB per case.
In a round each case takes --steps steps while the others wait. Every round begins with another case, so that clocks and temperatures are
the same for all. The first case is the baseline: `from_first` is the median over the rounds of the ratio of medians within a round, in
percent; `least` and `most` are the extremes.

`step` is a whole step by the host's clock, with the device synchronized before and after. `update` is the optimizer's part of the same
step, from the norm of the gradients to the new scales, between two events on the device. Measurements are appended to --csv.
"""

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.lm.build import build_training
from megatron.lm.config.presets import PRESETS
from megatron.lm.graphs import step_graph
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, name
from megatron.lm.step import train_step
from tools.bench import rows, training_steps

QUANTITIES = ("step", "update")
NOW = "now"
PROGRAM = "tools/bench/side_by_side.py"  # of a tree: modules that it imports have other names in other trees
Times = Mapping[str, Sequence[float]]  # of each quantity, ms


class Clock:
    """Record the times of calls of one method of an object: on a GPU between two events, elsewhere by the host's clock.

    Args:
        owner, method: the method to time; it is replaced on this instance.
        cuda: whether the calls launch work on a GPU.
    """

    def __init__(self, owner: Any, method: str, cuda: bool) -> None:
        self.run: Callable[[], Any] = getattr(owner, method)
        self.cuda, self.marks = cuda, []  # type: tuple[bool, list[Any]]
        setattr(owner, method, self)

    def __call__(self) -> Any:
        self._mark()
        result = self.run()
        self._mark()
        return result

    def _mark(self) -> None:
        if not self.cuda:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def take(self) -> list[float]:
        """Return the ms of the calls since the last `take`; all of them have finished on the device."""
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        times = [begin.elapsed_time(end) if self.cuda else 1e3 * (end - begin) for begin, end in pairs]
        self.marks.clear()
        return times


def serve(case: str, options: argparse.Namespace) -> None:
    """Build and warm up a case at the first line of stdin, then run as many steps as each line requests, and print a line of JSON for
    each. End of file instead of a line ends it."""
    if not sys.stdin.readline():
        return
    with contextlib.redirect_stdout(sys.stderr):  # the lines of JSON are the only output
        config = training_steps.configuration(case, options)
        process_groups.initialize(config)
        training = build_training(config, options.vocab_size)
        batches = training_steps.random_batches(config, options.vocab_size, process_groups.device())
        graphs, cuda = step_graph.build(training), process_groups.device().type == "cuda"
        captured = graphs is not None and graphs.mode == "step"
        clock = Clock(graphs, "update", cuda) if captured else Clock(training.optimizer, "step", cuda)

        def steps(number: int) -> dict[str, list[float]]:
            times = []
            for _ in range(number):
                training_steps.synchronize()
                start = time.perf_counter()
                train_step(training, batches, graphs)
                training_steps.synchronize()
                times.append(1e3 * (time.perf_counter() - start))
            return {"step": times, "update": clock.take()}

        steps(options.warm_up)
        if cuda:
            torch.cuda.empty_cache()  # memory of the eager steps is for the next case
    ready = {"captured": captured, "gib": torch.cuda.memory_reserved() / 2**30 if cuda else 0.0, "trainer": rows.__file__}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            measured = steps(int(line))
        print(json.dumps(measured), flush=True)


class Served:
    """A process that takes training steps when asked: it answers each line of its stdin by a line of JSON.

    Args:
        case: its name.
        tree: the folder that it runs in and imports from.
        program: its file and arguments.
    """

    def __init__(self, case: str, tree: Path, program: Sequence[str]) -> None:
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.case, self.tree = case, tree
        self.process = subprocess.Popen(
            [sys.executable, *program],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def build(self) -> dict[str, Any]:
        """Build and warm up; return whether graphs are replayed (`captured`) and the memory in `gib`.

        Raises:
            ValueError: the process ended, or imported another tree.
        """
        ready = self._ask("")
        if not Path(ready["trainer"]).resolve().is_relative_to(self.tree):
            raise ValueError(f"case {self.case!r} imported {ready['trainer']}, expected a file of {self.tree}: unset PYTHONPATH")
        return ready

    def steps(self, number: int) -> Times:
        """Take steps and return their times."""
        return self._ask(str(number))

    def _ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            raise ValueError(f"case {self.case!r} ended with {self.process.wait()}: its error is above; give fewer cases if memory ran out")
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


class Worker(Served):
    """The process of a case of this program, in its tree's own copy."""

    def __init__(self, case: str, tree: Path, options: argparse.Namespace) -> None:
        given = ["--preset", options.preset, "--micro-batch-size", str(options.micro_batch_size), "--vocab-size", str(options.vocab_size)]
        given += ["--warm-up", str(options.warm_up), f"--flags={options.flags}", "--serve", case.partition(" ")[2]]
        super().__init__(case, tree, [str(tree / PROGRAM), *given])


def measure(workers: Sequence[Served], rounds: int, steps: int) -> list[dict[str, Times]]:
    """Return the times of each case in each round; every round begins with another case."""
    rounds_of_trees = []
    for number in range(rounds):
        turn = number % len(workers)
        times = {worker.case: worker.steps(steps) for worker in (*workers[turn:], *workers[:turn])}
        rounds_of_trees.append({worker.case: times[worker.case] for worker in workers})
    return rounds_of_trees


def table(rounds: Sequence[Mapping[str, Times]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each quantity and case."""
    first = next(iter(rounds[0]))
    for quantity in QUANTITIES:
        for case in rounds[0]:
            low, middle, high = rows.percentiles([ms for times in rounds for ms in times[case][quantity]])
            ratios = [statistics.median(times[case][quantity]) / statistics.median(times[first][quantity]) for times in rounds]
            percent = [f"{100 * (ratio - 1):+.2f}" for ratio in (statistics.median(ratios), min(ratios), max(ratios))]
            yield {
                "case": case, "quantity": quantity, "rounds": len(rounds), "ms_p20": round(low, 3), "ms": round(middle, 3),
                "ms_p80": round(high, 3), "from_first": percent[0], "least": percent[1], "most": percent[2],
            }  # fmt: skip


def trees_of(texts: Sequence[str]) -> dict[str, Path]:
    """`NAME=FOLDER` flags -> folders by name, with the tree of this file as `NOW`.

    Raises:
        ValueError: another form, or a folder without the trainer or a copy of this file.
    """
    trees = {NOW: rows.ROOT}
    for text in texts:
        label, _, folder = text.partition("=")
        if not label or not (Path(folder) / "megatron/lm/step.py").is_file():
            raise ValueError(f"--tree {text}: give NAME=FOLDER, a folder with a tree of this repository")
        if not (Path(folder) / PROGRAM).is_file():
            raise ValueError(
                f"--tree {text}: {PROGRAM} is missing there because the tree is older; add its first version with git -C {folder} checkout "
                f"0fe148f -- {PROGRAM}"
            )
        trees[label] = Path(folder).resolve()
    return trees


def flags() -> Parser:
    """Return the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument("--tree", nargs="*", default=[], metavar="NAME=FOLDER", help="other trees")
    parser.add_argument("--cases", nargs="+", default=["now O2", "now O3"], type=name, metavar="'TREE PRECISION FLAGS'")
    parser.add_argument("--preset", default="1.3b", choices=list(PRESETS))
    parser.add_argument("--micro-batch-size", type=count(1), default=4)
    parser.add_argument("--vocab-size", type=count(1), default=training_steps.VOCABULARY)
    parser.add_argument("--warm-up", type=count(1), default=training_steps.WARM_UP, help="steps before the first round")
    parser.add_argument("--rounds", type=count(1), default=8)
    parser.add_argument("--steps", type=count(2), default=10, help="of each case in a round")
    parser.add_argument("--flags", default="", help="more flags of megatron.lm.pretrain, for every case")
    rows.add_flags(parser, "side_by_side.csv")
    parser.add_argument("--serve", metavar="CASE", help="run as the process of a case; started by other processes")
    return parser


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and append the results."""
    parser = flags()
    options = parser.parse_args(argv)
    if options.serve is not None:
        serve(options.serve, options)
        return 0
    trees = trees_of(options.tree)
    for case in options.cases:
        if case.partition(" ")[0] not in trees or not shlex.split(case)[1:]:
            parser.error(f"case {case!r}: begin with a tree, one of {', '.join(trees)}, and a precision")
    if len(set(options.cases)) < len(options.cases):
        parser.error(f"--cases lists a case twice: {', '.join(map(repr, options.cases))}")
    workers = [Worker(case, trees[case.partition(" ")[0]], options) for case in options.cases]
    try:
        for worker in workers:
            ready = worker.build()
            print(f"{worker.case}: {'replayed graphs' if ready['captured'] else 'eager steps'}, {ready['gib']:.1f} GiB", flush=True)
        times = measure(workers, options.rounds, options.steps)
    finally:
        for worker in workers:
            worker.close()
    where = rows.machine(options.commit) | {"preset": f"{options.preset} {options.flags}".strip(), "micro_batch": options.micro_batch_size}
    results = [where | row for row in table(times)]
    for row in results:
        print({key: value for key, value in row.items() if key not in where}, flush=True)
    rows.append(options.csv, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
