"""Compare the losses of training runs, from their metrics files.

    python -m megatron.lm.tools.loss_compare --base O0=runs/a/metrics.jsonl --other O2=runs/b/metrics.jsonl --max-rel 0.01

prints a table. With --max-rel the exit code is 1 if the final validation losses differ by more than that. A run without evaluations is
judged by its final smoothed training loss.

    python -m megatron.lm.tools.loss_compare --base O0=runs/O0_1/metrics.jsonl O0=runs/O0_2/metrics.jsonl \\
        --other O2=runs/O2_1/metrics.jsonl O2=runs/O2_2/metrics.jsonl --seeds 1 2

compares groups of runs, paired by seed in the order given: it prints each pair, then the mean difference, its 95 % interval and a verdict
(`paired_difference.py`). With --max-rel the exit code of a group is 0 only if the whole interval lies within that difference.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.lm.evaluation.paired_difference import EFFECT, HOLDS, PairedDifference, paired_difference
from megatron.lm.shell import arguments, exit_codes
from megatron.lm.tools.report import Run, differences, named_path, read_run, relative, smooth


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Relative differences are (other - base) / base; in training the loss is smoothed, over the common iterations."""

    base_final: float
    other_final: float
    final: str  # which loss the two above are
    max_train: float  # largest magnitude
    mean_train: float  # mean magnitude
    iterations: int

    @property
    def rel(self) -> float:
        """Relative difference of the final losses."""
        return relative(self.base_final, self.other_final)


def compare(base: Run, other: Run, window: int) -> Comparison:
    """Compare two runs, smoothing the training loss over `window` logged lines.

    Raises:
        ValueError: no common iteration, or the last evaluations were at different iterations.
    """
    shared, relative = differences(base, other, window)
    if base.valid and other.valid:
        last = base.valid[-1]["iteration"], other.valid[-1]["iteration"]
        if last[0] != last[1]:
            raise ValueError(
                f"the last evaluation of {base.name} is at iteration {last[0]}, of {other.name} at {last[1]}: compare runs of equal length"
            )
        finals, kind = (base.valid[-1]["loss"], other.valid[-1]["loss"]), f"validation, iteration {last[0]}"
    else:
        common = set(shared)
        ends = [smooth([line["loss"] for line in run.train if line["iteration"] in common], window)[-1] for run in (base, other)]
        finals = ends[0], ends[1]
        kind = f"training (smoothed), iteration {shared[-1]}"
    sizes = [abs(d) for d in relative]
    largest = math.nan if any(map(math.isnan, sizes)) else max(sizes)
    return Comparison(
        base_final=finals[0],
        other_final=finals[1],
        final=kind,
        max_train=largest,
        mean_train=statistics.fmean(sizes),
        iterations=len(shared),
    )


def table(base: Run, other: Run, result: Comparison) -> str:
    """Return the comparison as aligned text."""
    rows = [
        ("", base.name, other.name, "difference"),
        (f"final loss: {result.final}", f"{result.base_final:.4f}", f"{result.other_final:.4f}", f"{100 * result.rel:+.3f} %"),
        (f"training, largest of {result.iterations}", "", "", f"{100 * result.max_train:.3f} %"),
        (f"training, mean of {result.iterations}", "", "", f"{100 * result.mean_train:.3f} %"),
    ]
    return _aligned(rows)


def compare_groups(bases: Sequence[Run], others: Sequence[Run], seeds: Sequence[int], window: int) -> tuple[str, PairedDifference]:
    """Compare runs of the same seeds: a table with a line per pair, and the paired difference of their final losses.

    Args:
        bases, others: runs in the order of `seeds`.
        seeds: of the pairs, all different.
        window: as in `compare`.

    Raises:
        ValueError: as in `compare`, or the pairs ended at different iterations.
    """
    results = {seed: compare(base, other, window) for seed, base, other in zip(seeds, bases, others, strict=True)}
    ends = {result.final: seed for seed, result in results.items()}
    if len(ends) > 1:
        raise ValueError(
            f"the pairs end differently ({'; '.join(f'seed {seed}: {end}' for end, seed in ends.items())}): train all of them to the same "
            "iteration"
        )
    rows = [("seed", bases[0].name, others[0].name, "difference")]
    rows += [(f"{seed}", f"{one.base_final:.4f}", f"{one.other_final:.4f}", f"{100 * one.rel:+.3f} %") for seed, one in results.items()]
    finals = ({seed: getattr(one, key) for seed, one in results.items()} for key in ("base_final", "other_final"))
    return f"final loss: {next(iter(ends))}\n{_aligned(rows)}", paired_difference(*finals)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(row[0].ljust(widths[0]) + "".join("  " + row[i].rjust(widths[i]) for i in (1, 2, 3)) for row in rows)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; exit code 1 if --max-rel is exceeded or a loss is not finite, otherwise as in `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument(
        "--base", type=named_path, required=True, nargs="+", metavar="NAME=METRICS", help="the run, or group of runs, to compare with"
    )
    parser.add_argument(
        "--other", type=named_path, required=True, nargs="+", metavar="NAME=METRICS", help="the run, or group of runs, to judge"
    )
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="seeds of a group's runs, in their order (default: 1, 2, ...)")
    parser.add_argument("--max-rel", type=float, help="largest accepted relative difference of the final loss, such as 0.01")
    parser.add_argument("--window", type=arguments.count(1), default=3, help="logged lines averaged by smoothing (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.max_rel is not None and not args.max_rel >= 0:
        raise ValueError(f"--max-rel {args.max_rel} must be 0 or more")
    seeds = _seeds(args.base, args.other, args.seeds)
    bases, others = ([read_run(*named) for named in group] for group in (args.base, args.other))
    if len(seeds) > 1:
        text, difference = compare_groups(bases, others, seeds, args.window)
        print(text)
        print(difference.sentence(bases[0].name, others[0].name, EFFECT if args.max_rel is None else args.max_rel))
        return int(args.max_rel is not None and difference.verdict(args.max_rel) != HOLDS)
    base, other = bases[0], others[0]
    result = compare(base, other, args.window)
    print(table(base, other, result))
    for run, final in ((base, result.base_final), (other, result.other_final)):
        if not math.isfinite(final):
            print(f"the final loss of {run.name} is not finite: the run has diverged")
    if result.base_final:
        print(paired_difference({seeds[0]: result.base_final}, {seeds[0]: result.other_final}).sentence(base.name, other.name))
    if args.max_rel is not None and not abs(result.rel) <= args.max_rel:
        print(f"{other.name} is more than {100 * args.max_rel:g} % from {base.name}")
        return 1
    return 0


def _seeds(base: Sequence[tuple[str, Path]], other: Sequence[tuple[str, Path]], given: Sequence[int] | None) -> list[int]:
    """Return the seeds of the pairs; ValueError if runs or seeds do not pair."""
    if len(base) != len(other):
        raise ValueError(f"--base has {len(base)} runs and --other {len(other)}: give the same number of each, in the order of their seeds")
    for flag, group in (("--base", base), ("--other", other)):
        names = list(dict.fromkeys(name for name, _ in group))
        if len(names) > 1:
            raise ValueError(
                f"{flag} has runs of {' and '.join(names)}: give the runs of a group one name, and compare two groups at a time"
            )
    seeds = list(given or range(1, len(base) + 1))
    if len(seeds) != len(base) or len(set(seeds)) != len(seeds):
        raise ValueError(f"--seeds {' '.join(map(str, seeds))}: give {len(base)} different seeds, one per run of --base")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
