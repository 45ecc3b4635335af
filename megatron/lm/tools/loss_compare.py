"""Compare the losses of training runs, from their metrics files.

    msamp compare O0=runs/a/metrics.jsonl O2=runs/b/metrics.jsonl --max-rel 0.01
    msamp compare O0=runs/O0_1/metrics.jsonl O0=runs/O0_2/metrics.jsonl O2=runs/O2_1/metrics.jsonl O2=runs/O2_2/metrics.jsonl --seeds 1 2

The name that comes first is what the other is compared with. Runs of a name are a group, and their runs are paired by seed in the order
given. The tool prints the final losses of each pair, then their mean difference, its 95 % interval, its cost in tokens and a verdict
(`paired_difference.py`). A run without evaluations is judged by its final smoothed training loss. With --max-rel the exit code is 1 if
the final losses of a pair differ by more than that; of several pairs, unless the whole interval lies within it.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.lm.evaluation.paired_difference import HOLDS, paired_difference
from megatron.lm.shell import arguments, exit_codes
from megatron.lm.tools.report import Run, differences, named_path, read_run, relative, smooth


def final_losses(base: Run, other: Run, window: int) -> tuple[float, float, str]:
    """Return the final losses of two runs, and which losses they are: of validation, or of training smoothed over `window` logged lines.

    Raises:
        ValueError: no common iteration, or the last evaluations were at different iterations.
    """
    shared, _ = differences(base, other, window)
    if base.valid and other.valid:
        last = base.valid[-1]["iteration"], other.valid[-1]["iteration"]
        if last[0] != last[1]:
            raise ValueError(
                f"the last evaluation of {base.name} is at iteration {last[0]}, of {other.name} at {last[1]}: compare runs of equal length"
            )
        return base.valid[-1]["loss"], other.valid[-1]["loss"], f"validation, iteration {last[0]}"
    common = set(shared)
    ends = [smooth([line["loss"] for line in run.train if line["iteration"] in common], window)[-1] for run in (base, other)]
    return ends[0], ends[1], f"training (smoothed), iteration {shared[-1]}"


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; exit code 1 if --max-rel is exceeded or a loss is not finite, otherwise as in `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("runs", type=named_path, nargs="+", metavar="NAME=METRICS", help="runs of two names, the baseline's first")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="seeds of a group's runs, in their order (default: 1, 2, ...)")
    parser.add_argument(
        "--max-rel",
        type=float,
        help="largest accepted relative difference of the final loss, such as 0.01 (default: 0.01 nats per token, as a verdict only)",
    )
    parser.add_argument("--window", type=arguments.count(1), default=3, help="logged lines averaged by smoothing (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.max_rel is not None and not args.max_rel >= 0:
        raise ValueError(f"--max-rel {args.max_rel} must be 0 or more")
    groups: dict[str, list[tuple[str, Path]]] = {}
    for name, file in args.runs:
        groups.setdefault(name, []).append((name, file))
    seeds = _seeds(groups, args.seeds)
    bases, others = ([read_run(*named) for named in group] for group in groups.values())
    finals = {seed: final_losses(base, other, args.window) for seed, base, other in zip(seeds, bases, others, strict=True)}
    ends = {kind: seed for seed, (_, _, kind) in finals.items()}
    if len(ends) > 1:
        raise ValueError(
            f"the pairs end differently ({'; '.join(f'seed {seed}: {end}' for end, seed in ends.items())}): train all of them to the same "
            "iteration"
        )
    print(f"final loss: {next(iter(ends))}")
    print(f"{'seed':<8}{bases[0].name:>12}{others[0].name:>12}{'difference':>14}")
    for seed, (base, other, _) in finals.items():
        print(f"{seed:<8}{base:>12.4f}{other:>12.4f}{100 * relative(base, other):>+12.3f} %")
    difference = paired_difference({seed: base for seed, (base, _, _) in finals.items()}, {seed: x for seed, (_, x, _) in finals.items()})
    print(
        difference.sentence(
            bases[0].name, others[0].name, args.max_rel, [(line["iteration"], line["loss"]) for run in bases for line in run.train]
        )
    )
    if args.max_rel is None:
        return 0
    held = abs(difference.relative.mean) <= args.max_rel if len(seeds) == 1 else difference.verdict(args.max_rel) == HOLDS
    return int(not held)


def _seeds(groups: Mapping[str, Sequence[object]], given: Sequence[int] | None) -> list[int]:
    """Return the seeds of the pairs; ValueError if runs or seeds do not pair."""
    counts = [f"{len(group)} of {name}" for name, group in groups.items()]
    if len(groups) != 2 or len({len(group) for group in groups.values()}) > 1:
        raise ValueError(f"the runs are {', '.join(counts)}: give runs of two names, as many of each, in the order of their seeds")
    base = next(iter(groups.values()))
    seeds = list(given or range(1, len(base) + 1))
    if len(seeds) != len(base) or len(set(seeds)) != len(seeds):
        raise ValueError(f"--seeds {' '.join(map(str, seeds))}: give {len(base)} different seeds, one per run of a name")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
