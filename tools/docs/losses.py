"""Tables of losses: curves against BF16 of the same seeds, seeds against each other, and CUDA graphs against eager steps."""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.lm.evaluation.paired_difference import Interval, PairedDifference, paired_difference
from tools.docs.cells import BENCH, PRECISIONS, REPRODUCE, Cell, Sentence, Table, column, of, pick
from tools.docs.evidence import Row, read
from tools.reproduce.compare_precisions import FIRST_SEED, folder_of

CURVES = f"{REPRODUCE}/precisions/curves.csv"  # runs of PRECISIONS, whose rows name their commit
OPTIONS, SUMS = f"{REPRODUCE}/fp8_options", f"{REPRODUCE}/fp8_sums"  # folders of FP8's options, their files in the same form
REMEDIES = f"{REPRODUCE}/remedies_125m"  # likewise, of the remedies for outliers, where there are none
LARGE, EXPERTS = f"{REPRODUCE}/precisions_1.3b", f"{REPRODUCE}/moe_107m"  # likewise, of GPT-1.3B and of a mixture of experts
TWO_RANKS = f"{REPRODUCE}/dp2_125m"  # likewise, on two data-parallel ranks
SEEDS = f"{BENCH}/gpt3_125m_enwik8/curves.csv"
LONG, LONGEST = f"{REPRODUCE}/long_125m/curves.csv", f"{REPRODUCE}/long_400m/curves.csv"
ITEMS, UPDATES = f"{REPRODUCE}/long_400m/items.csv", f"{REPRODUCE}/long_400m/updates.csv"  # of the models of LONGEST
GRAPHS = f"{BENCH}/graphs_125m.csv"
BASE = "bf16"
Differences = dict[str, list[list[float]]]  # by precision, at each evaluation: mean, least and most
Runs = dict[tuple[str, str], dict[int, float]]  # losses by level and seed, then by tokens


def evaluations(precisions: str = PRECISIONS, curves: str = CURVES) -> dict[str, dict[int, dict[str, float]]]:
    """Return the validation losses of every precision with several seeds: precision -> tokens -> number of the run -> loss."""
    by_precision: dict[str, dict[int, dict[str, float]]] = {}
    several = {folder_of(row["precision"]): row["precision"] for row in read(precisions) if int(row["seeds"]) > 1}
    for row in read(curves):
        folder, _, number = row["run"].rpartition("_")
        if row["kind"] == "valid" and folder in several:
            by_precision.setdefault(several[folder], {}).setdefault(int(row["tokens"]), {})[number] = float(row["loss"])
    return by_precision


def differences(precisions: str = PRECISIONS, curves: str = CURVES) -> tuple[list[int], Differences]:
    """Return the tokens of the evaluations, and the relative differences from BF16: each run from the one of the same seed."""
    losses = evaluations(precisions, curves)
    base = losses.pop(BASE)
    by_pair: Differences = {}
    for precision, by_tokens in losses.items():
        for tokens, by_run in by_tokens.items():
            apart = [loss / base[tokens][number] - 1 for number, loss in by_run.items()]
            by_pair.setdefault(precision, []).append([statistics.fmean(apart), min(apart), max(apart)])
    return list(base), by_pair


def final_losses(precisions: str = PRECISIONS, curves: str = CURVES) -> dict[str, dict[int, float]]:
    """Return the last validation loss of every precision by seed, in nats per token, including those with one seed."""
    names = {folder_of(row["precision"]): row["precision"] for row in read(precisions)}
    last = _last([row for row in read(curves) if row["kind"] == "valid"])
    by_precision: dict[str, dict[int, float]] = {}
    for run, row in last.items():
        folder, _, number = run.rpartition("_")
        if folder in names:
            by_precision.setdefault(names[folder], {})[FIRST_SEED + int(number)] = float(row["loss"])
    return by_precision


def paired(precision: str, base: str = BASE, precisions: str = PRECISIONS, curves: str = CURVES) -> PairedDifference:
    """Compare the last validation losses of two precisions, over the seeds that both have.

    Raises:
        ValueError: they have no seed in common, or one has no run.
    """
    losses = final_losses(precisions, curves)
    missing = [name for name in (precision, base) if name not in losses]
    if missing:
        raise ValueError(f"{curves} has no run of {missing[0]}, only of {', '.join(losses)}: compare_precisions.py creates it")
    common = {seed: loss for seed, loss in losses[precision].items() if seed in losses[base]}
    return paired_difference(losses[base], common)


def shown(relative: Interval) -> str:
    """Format a relative difference in percent with its 95 % interval, or "one seed" if there is no interval."""
    mean = f"{100 * relative.mean:+.2f}"
    low, high = (100 * end for end in relative.ends)
    return f"{mean} (one seed)" if relative.half_width is None else f"{mean} ({low:+.2f} to {high:+.2f})"


def files(folder: str) -> tuple[str, str]:
    """Return the files of a comparison of precisions in a folder: rows and curves."""
    return f"{folder}/precisions.csv", f"{folder}/curves.csv"


def by_precision(file: str = PRECISIONS) -> dict[str, Row]:
    """Return the rows of a comparison of precisions."""
    return {row["precision"]: row for row in read(file)}


def row_of(precision: str) -> Row:
    """Return the row of a precision in the comparison of all.

    Raises:
        ValueError: there is none.
    """
    rows = by_precision()
    if precision not in rows:
        raise ValueError(f"{PRECISIONS} has no row of {precision}, only of {', '.join(rows)}: compare_precisions.py creates it")
    return rows[precision]


def rows_of_precisions(precisions: Iterable[str]) -> Sequence[Row]:
    """Return the rows that name the commit of these precisions' runs."""
    names = set(precisions)
    return pick(PRECISIONS, lambda row: row["precision"] in names)


def against_bf16() -> Table:
    """Validation loss of each precision relative to BF16 with the same seeds, at each evaluation: mean and 95 % interval."""
    losses = evaluations()
    cells = [[f"`{BASE}`, nats per token", *(f"{statistics.fmean(by_run.values()):.4f}" for by_run in losses[BASE].values())]]
    for precision in (name for name in losses if name != BASE):
        above = (paired_difference(losses[BASE][tokens], by_run).relative for tokens, by_run in losses[precision].items())
        cells.append([f"`{precision}`, % from it, 95 % interval", *map(shown, above)])
    columns = ["", *(f"{count / 1e6:.1f}M tokens" for count in losses[BASE])]
    return Table(columns, cells, [(PRECISIONS, rows_of_precisions(losses))])


def options(folder: str = OPTIONS) -> Table:
    """Last validation losses with each FP8 option, and the differences from BF16 with the same seeds."""
    precisions, curves = files(folder)
    last = differences(precisions, curves)[0][-1]
    losses, rows = evaluations(precisions, curves), read(precisions)
    cells = []
    for row in rows:
        values = list(losses[row["precision"]][last].values())
        loss = f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
        against = "" if row["precision"] == BASE else shown(paired(row["precision"], BASE, precisions, curves).relative)
        cells.append([f"`{row['precision']}`", str(len(values)), loss, against, f"{float(row['peak_gib']):.2f}"])
    columns = ["precision", "seeds", f"loss after {last / 1e6:.1f}M tokens", "% from BF16 of the same seed, 95 % interval", "peak GiB"]
    return Table(columns, cells, [(precisions, rows)])


def _last(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the row of the last iteration of each run."""
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


def longest() -> Sentence:
    """How far O3 ends from BF16 in the longest training run, in words."""
    table = judged()
    apart, trained = (line[-1] for one in (table, longer_run()) for line in one.cells if "`O3`" in line[0])
    text = f"""Longest training run: GPT-125M, {table.columns[-1]} over two data-parallel ranks, one seed. At O3 the held-out
        loss ends {apart} % from BF16's, that of the training text, read four times, {trained} % (last quarter)."""
    return Sentence(" ".join(text.split()), table.sources)


def judged() -> Table:
    """Held-out losses of the longest run, and their distances from O0's, at each evaluation."""
    rows, runs = _by_run(LONGEST, "valid")
    evaluations = next(iter(runs.values()))
    return _from_the_first(LONGEST, rows, runs, {f"{tokens / 1e6:.0f}M tokens": [tokens] for tokens in evaluations})


def by_item() -> Table:
    """Models of the longest run judged item by item: O0's value, and the others' differences with their intervals over items."""
    rows = pick(ITEMS)
    base, *others = dict.fromkeys(row["model"] for row in rows)
    of = {(row["kind"], row["model"]): row for row in rows}
    cells = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        name = kind.removesuffix(", share correct")
        scale, digits, unit = (1, 4, "") if name == kind else (100, 1, "% correct")
        apart = [Interval(mean=float(of[kind, one]["above_base"]), half_width=float(of[kind, one]["half_width"])) for one in others]
        values = [f"{scale * one.mean:+.{digits}f} ({' to '.join(f'{scale * end:+.{digits}f}' for end in one.ends)})" for one in apart]
        agreement = name.removesuffix("_english_cont").removesuffix("_english").replace("_", " ")
        name = f"agreement, {agreement}{', continued' if name.endswith('_cont') else ''}" if "_english" in name else name
        cells.append([name, of[kind, base]["items"], f"{scale * float(of[kind, base]['value']):.{digits}f} {unit}".rstrip(), *values])
    return Table(["items", "number", f"`{base}`", *(f"`{one}` less `{base}`" for one in others)], cells, [(ITEMS, rows)])


def updates() -> Table:
    """Recorded steps of the longest run: what share of the masters does not move in a step, and what share of the update is missing."""
    rows = pick(UPDATES, lambda row: float(row["lost"]) > 0)
    columns = {
        "level": lambda row: f"`{row['level']}`",
        "step": column("iteration"),
        "norm of the update": column("update_norm", 4),
        "masters that do not move, %": column("lost", 1, 100),
        "update that does not arrive, %": column("undelivered", 3, 100),
    }
    return of(UPDATES, rows, columns)


def longer_run(file: str = LONGEST, parts: int = 4) -> Table:
    """Training losses of a long run relative to O0 on the same batches, mean of the logged steps of each part; O0 of another seed, whose
    batches differ, shows how far apart two runs of one precision are. Only steps that every run logged count."""
    rows, runs = _by_run(file, "train")
    logged = sorted(set.intersection(*map(set, runs.values())))
    ends = [logged[-1] * part // parts for part in range(parts + 1)]
    within = {f"to {last / 1e6:.0f}M tokens": [at for at in logged if first < at <= last] for first, last in itertools.pairwise(ends)}
    return _from_the_first(file, rows, runs, within)


def _by_run(file: str, kind: str) -> tuple[list[Row], Runs]:
    """Return the rows of a kind, and their losses."""
    rows, runs = pick(file, lambda row: row["kind"] == kind), Runs()
    for row in rows:
        runs.setdefault((row["level"], row["seed"]), {})[int(row["tokens"])] = float(row["loss"])
    return rows, runs


def _from_the_first(file: str, rows: Sequence[Row], runs: Runs, within: Mapping[str, Sequence[int]]) -> Table:
    """Mean losses of the first run within parts of it, by column, and the mean relative differences of the others."""
    (base_name, base), *others = runs.items()
    cells = [
        ["`{}`, seed {}, nats per token".format(*base_name), *(f"{statistics.fmean(base[at] for at in p):.4f}" for p in within.values())]
    ]
    for name, losses in others:
        apart = (100 * statistics.fmean(losses[at] / base[at] - 1 for at in part) for part in within.values())
        cells.append(["`{}`, seed {}, % from it".format(*name), *(f"{value:+.2f}" for value in apart)])
    return Table(["", *within], cells, [(file, rows)])


def graphs() -> Table:
    """Last validation losses with and without CUDA graphs, and of repetitions of the same commands."""
    rows = pick(GRAPHS, lambda row: row["kind"] == "valid")
    last = {(row["level"], row["run"], row["cuda_graph"]): row for row in sorted(rows, key=lambda row: int(row["iteration"]))}
    used = [{**row, "eager": last[level, run, "none"]["loss"]} for (level, run, kind), row in last.items() if kind == "step"]
    level: Cell = lambda row: f"`{row['level']}`"  # noqa: E731 - defined like the other columns
    columns = {"level": level, "start": column("run"), "with graphs": column("loss", 4), "eager": column("eager", 4)}
    return of(GRAPHS, used, columns)


COMPARISONS = {"loss-options": OPTIONS, "loss-sums": SUMS, "loss-large": LARGE, "loss-experts": EXPERTS, "loss-two-ranks": TWO_RANKS,
               "loss-remedies": REMEDIES}  # fmt: skip
TABLES: dict[str, Callable[[], Table]] = {
    "loss-curves": against_bf16,
    **{name: functools.partial(options, folder) for name, folder in COMPARISONS.items()},
    "loss-seeds": two_seeds,
    "loss-long": longer_run,
    "loss-long-judged": judged,
    "loss-long-items": by_item,
    "loss-long-updates": updates,
    "loss-long-earlier": lambda: longer_run(LONG),
    "loss-graphs": graphs,
}
