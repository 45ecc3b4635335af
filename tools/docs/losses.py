"""Tables of losses: curves against BF16 of the same seeds, seeds against each other, and CUDA graphs against eager steps."""

import statistics
from collections.abc import Iterable, Sequence

from tools.docs.cells import BENCH, PRECISIONS, REPRODUCE, Cell, Table, column, of, pick
from tools.docs.evidence import Row, read
from tools.reproduce.compare_precisions import folder_of

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
    """Validation loss of each precision against BF16 of the same seeds, at each evaluation."""
    tokens, apart = differences()
    losses = evaluations()
    cells = [[f"`{BASE}`, nats a token", *(f"{statistics.fmean(by_run.values()):.4f}" for by_run in losses[BASE].values())]]
    for precision, found in apart.items():
        ranges = (f"{100 * mean:+.2f} ({100 * least:+.2f} to {100 * most:+.2f})" for mean, least, most in found)
        cells.append([f"`{precision}`, % from it", *ranges])
    columns = ["", *(f"{count / 1e6:.1f}M tokens" for count in tokens)]
    return Table(columns, cells, [(PRECISIONS, rows_of_precisions([BASE, *apart]))])


def options(folder: str = OPTIONS) -> Table:
    """Last validation losses with each of FP8's options, and the differences from BF16 of the same seeds."""
    precisions, curves = files(folder)
    (*_, last), apart = differences(precisions, curves)
    losses, rows = evaluations(precisions, curves), read(precisions)
    cells = []
    for row in rows:
        found = list(losses[row["precision"]][last].values())
        mean, least, most = apart.get(row["precision"], [[0.0] * 3])[-1]
        loss = f"{statistics.fmean(found):.4f} ({min(found):.4f} to {max(found):.4f})"
        against = "" if row["precision"] == BASE else f"{100 * mean:+.2f} ({100 * least:+.2f} to {100 * most:+.2f})"
        cells.append([f"`{row['precision']}`", str(len(found)), loss, against, f"{float(row['peak_gib']):.2f}"])
    columns = ["precision", "seeds", f"loss after {last / 1e6:.1f}M tokens", "% from BF16 of the same seed", "peak GiB"]
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
