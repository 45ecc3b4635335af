"""Tables of losses: curves against BF16 of the same seeds, seeds against each other, and CUDA graphs against eager steps."""

import statistics
from collections.abc import Iterable, Sequence

from megatron.lm.evaluation.paired_difference import Interval, PairedDifference, paired_difference
from tools.docs.cells import BENCH, PRECISIONS, REPRODUCE, Cell, Table, column, of, pick
from tools.docs.evidence import Row, read
from tools.reproduce.compare_precisions import FIRST_SEED, folder_of

CURVES = f"{REPRODUCE}/precisions/curves.csv"  # runs of the rows of PRECISIONS, which name their commit
OPTIONS, SUMS = f"{REPRODUCE}/fp8_options", f"{REPRODUCE}/fp8_sums"  # folders of FP8's options, their files in the same form
LARGE = f"{REPRODUCE}/precisions_1.3b"  # likewise, of GPT-1.3B
SEEDS = f"{BENCH}/gpt3_125m_enwik8/curves.csv"
GRAPHS = f"{BENCH}/graphs_125m.csv"
BASE = "bf16"
Differences = dict[str, list[list[float]]]  # by precision, at each evaluation: mean, least and most


def evaluations(precisions: str = PRECISIONS, curves: str = CURVES) -> dict[str, dict[int, dict[str, float]]]:
    """Validation losses of every precision that has several seeds: precision -> tokens -> number of the run -> loss."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    several = {folder_of(row["precision"]): row["precision"] for row in read(precisions) if int(row["seeds"]) > 1}
    for row in read(curves):
        folder, _, number = row["run"].rpartition("_")
        if row["kind"] == "valid" and folder in several:
            found.setdefault(several[folder], {}).setdefault(int(row["tokens"]), {})[number] = float(row["loss"])
    return found


def differences(precisions: str = PRECISIONS, curves: str = CURVES) -> tuple[list[int], Differences]:
    """Tokens of the evaluations, and the relative differences from BF16 there: each run from the one of the same seed."""
    losses = evaluations(precisions, curves)
    base = losses.pop(BASE)
    found: Differences = {}
    for precision, by_tokens in losses.items():
        for tokens, by_run in by_tokens.items():
            apart = [loss / base[tokens][number] - 1 for number, loss in by_run.items()]
            found.setdefault(precision, []).append([statistics.fmean(apart), min(apart), max(apart)])
    return list(base), found


def final_losses(precisions: str = PRECISIONS, curves: str = CURVES) -> dict[str, dict[int, float]]:
    """Last validation loss of every precision by seed, in nats per token; of those with one seed too."""
    names = {folder_of(row["precision"]): row["precision"] for row in read(precisions)}
    last = _last([row for row in read(curves) if row["kind"] == "valid"])
    found: dict[str, dict[int, float]] = {}
    for run, row in last.items():
        folder, _, number = run.rpartition("_")
        if folder in names:
            found.setdefault(names[folder], {})[FIRST_SEED + int(number)] = float(row["loss"])
    return found


def paired(precision: str, base: str = BASE, precisions: str = PRECISIONS, curves: str = CURVES) -> PairedDifference:
    """The last validation losses of a precision against those of another, of the seeds that both have.

    Raises:
        ValueError: they have no seed in common, or one has no run.
    """
    losses = final_losses(precisions, curves)
    missing = [name for name in (precision, base) if name not in losses]
    if missing:
        raise ValueError(f"{curves} has no run of {missing[0]}, but of {', '.join(losses)}: compare_precisions.py makes it")
    common = {seed: loss for seed, loss in losses[precision].items() if seed in losses[base]}
    return paired_difference(losses[base], common)


def shown(relative: Interval) -> str:
    """A relative difference in percent with its 95 % interval; a single seed has none, and the text says so."""
    mean = f"{100 * relative.mean:+.2f}"
    low, high = (100 * end for end in relative.ends)
    return f"{mean} (one seed)" if relative.half_width is None else f"{mean} ({low:+.2f} to {high:+.2f})"


def files(folder: str) -> tuple[str, str]:
    """What a comparison of precisions left in a folder: its rows, and its curves."""
    return f"{folder}/precisions.csv", f"{folder}/curves.csv"


def by_precision(file: str = PRECISIONS) -> dict[str, Row]:
    """The rows of a comparison of precisions."""
    return {row["precision"]: row for row in read(file)}


def row_of(precision: str) -> Row:
    """The row of a precision in the comparison of all.

    Raises:
        ValueError: there is none.
    """
    rows = by_precision()
    if precision not in rows:
        raise ValueError(f"{PRECISIONS} has no row of {precision}, but of {', '.join(rows)}: compare_precisions.py makes it")
    return rows[precision]


def rows_of_precisions(precisions: Iterable[str]) -> Sequence[Row]:
    """The rows that name the commit of these precisions' runs."""
    wanted = set(precisions)
    return pick(PRECISIONS, lambda row: row["precision"] in wanted)


def against_bf16() -> Table:
    """Validation loss of each precision against BF16 of the same seeds, at each evaluation: mean and 95 % interval."""
    losses = evaluations()
    cells = [[f"`{BASE}`, nats per token", *(f"{statistics.fmean(by_run.values()):.4f}" for by_run in losses[BASE].values())]]
    for precision in (name for name in losses if name != BASE):
        found = (paired_difference(losses[BASE][tokens], by_run).relative for tokens, by_run in losses[precision].items())
        cells.append([f"`{precision}`, % from it, 95 % interval", *map(shown, found)])
    columns = ["", *(f"{count / 1e6:.1f}M tokens" for count in losses[BASE])]
    return Table(columns, cells, [(PRECISIONS, rows_of_precisions(losses))])


def options(folder: str = OPTIONS) -> Table:
    """Last validation losses with each of FP8's options, and the differences from BF16 of the same seeds."""
    precisions, curves = files(folder)
    last = differences(precisions, curves)[0][-1]
    losses, rows = evaluations(precisions, curves), read(precisions)
    cells = []
    for row in rows:
        found = list(losses[row["precision"]][last].values())
        loss = f"{statistics.fmean(found):.4f} ({min(found):.4f} to {max(found):.4f})"
        against = "" if row["precision"] == BASE else shown(paired(row["precision"], BASE, precisions, curves).relative)
        cells.append([f"`{row['precision']}`", str(len(found)), loss, against, f"{float(row['peak_gib']):.2f}"])
    columns = ["precision", "seeds", f"loss after {last / 1e6:.1f}M tokens", "% from BF16 of the same seed, 95 % interval", "peak GiB"]
    return Table(columns, cells, [(precisions, rows)])


def _last(rows: Sequence[Row]) -> dict[str, Row]:
    """By run, the row of the last iteration."""
    return {row["run"]: row for row in sorted(rows, key=lambda row: int(row["iteration"]))}


def two_seeds() -> Table:
    """Last validation losses at O0 and O2, by seed."""
    rows = pick(SEEDS, lambda row: row["kind"] == "valid")
    last = _last(rows)
    pairs = [(last[f"O0 seed {seed}"], last[f"O2 seed {seed}"]) for seed in sorted({run.split()[-1] for run in last}, key=int)]
    used = [{**base, "seed": base["run"].split()[-1], "other": other["loss"],
             "apart": str(float(other["loss"]) / float(base["loss"]) - 1)} for base, other in pairs]  # fmt: skip
    columns = {"seed": column("seed"), "tokens": column("tokens"), "`O0`": column("loss", 4), "`O2`": column("other", 4),
               "difference %": column("apart", 2, 100)}  # fmt: skip
    return of(SEEDS, used, columns)


def graphs() -> Table:
    """Last validation losses with CUDA graphs and without, and of the same commands started again."""
    rows = pick(GRAPHS, lambda row: row["kind"] == "valid")
    last = {(row["level"], row["run"], row["cuda_graph"]): row for row in sorted(rows, key=lambda row: int(row["iteration"]))}
    used = [{**row, "eager": last[level, run, "none"]["loss"]} for (level, run, kind), row in last.items() if kind == "step"]
    level: Cell = lambda row: f"`{row['level']}`"  # noqa: E731 - a column like the others
    columns = {"level": level, "start": column("run"), "with graphs": column("loss", 4), "eager": column("eager", 4)}
    return of(GRAPHS, used, columns)
