"""Tables of FP8 with outliers: what a run loses when channels of SwiGLU grow, with and without a remedy, what the guard costs, and what a
trained model with outliers loses that is continued at several precisions."""

import statistics
from collections.abc import Callable

from megatron.lm.evaluation.paired_difference import paired_difference
from tools.docs.cells import BENCH, REPRODUCE, Cell, Table, code, column, of, pick
from tools.docs.evidence import Row, read
from tools.docs.losses import shown

LOSSES, TOY, TIMES = f"{BENCH}/outliers.csv", f"{BENCH}/outliers_toy.csv", f"{BENCH}/guard.csv"
CONTINUED = f"{REPRODUCE}/smollm2/continued.csv"
BASE = "bf16"


def losses() -> Table:
    """Loss of GPT-125M in which channels grow to be a million times as large as the others, by case, and its distance from BF16 of the same
    run."""
    rows = pick(LOSSES)
    grown: Cell = lambda row: f"from step {row['at']}" + (f" to {row['until']}" if row["until"] else "")  # noqa: E731 - like other columns
    columns: dict[str, Cell] = {
        "outliers": grown, "case": code("case"), "loss before": column("before", 3), "loss at the end": column("loss", 3),
        "% from BF16 of the same call": column("from_first", 1),
    }  # fmt: skip
    return of(LOSSES, rows, columns)


def remedies() -> Table:
    """A tiny model in which channels grow and shrink again, several seeds: loss of each case from BF16's of the same seed."""
    rows = pick(TOY)
    by_case: dict[str, dict[int, Row]] = {}
    for row in rows:
        grown = float(row["factor"]) > 1
        by_case.setdefault(row["case"] if grown else f"{row['case']}, no outliers", {})[_seed(row)] = row
    base = {seed: float(row["loss"]) for seed, row in by_case[BASE].items()}
    cells = []
    for name, of_case in by_case.items():
        losses = {seed: float(row["loss"]) for seed, row in of_case.items()}
        case, _, none = name.partition(", ")
        apart = "" if name == BASE else shown(paired_difference(base, losses).relative)
        raised = sorted({f"{row['raised']} of {row['layers']}" for row in of_case.values() if row["raised"]})
        left = sum(int(row["still_raised"]) for row in of_case.values() if row["still_raised"])
        cells.append([f"`{case}`" + (f", {none}" if none else ""), str(len(losses)), f"{statistics.fmean(losses.values()):.4f}", apart,
                      " to ".join(raised) + (f", {left} at the end" if raised else "")])  # fmt: skip
    columns = ["case", "seeds", "loss at the end", "% from BF16 of the same seed, 95 % interval", "layers raised at once"]
    return Table(columns, cells, [(TOY, rows)])


def _seed(row: Row) -> int:
    """Return the seed of a row, which its flags name."""
    return int(row["preset"].split("--seed ")[1].split()[0])


def times() -> Table:
    """Steps with SwiGLU: the guard's measured and unmeasured steps, and Smooth-SwiGLU. What was measured in turns has its mean."""
    rows = pick(TIMES)
    measured: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        measured.setdefault((row["preset"].split()[0], row["case"]), []).append(row)
    ms = {key: statistics.fmean(float(row["ms"]) for row in alike) for key, alike in measured.items()}
    cells = []
    for (preset, case), alike in measured.items():
        level, _, flags = case.partition(" ")
        slower = f"{100 * (ms[preset, case] / ms[preset, level] - 1):+.1f}" if flags else ""
        peak = max(float(row["peak_gib"]) for row in alike)
        cells.append([f"GPT-{preset.upper()}", f"`{case}`", f"{ms[preset, case]:.1f}", slower, f"{peak:.2f}"])
    return Table(["model", "case", "ms/step", "% from the level alone", "peak GiB"], cells, [(TIMES, rows)])


def continued() -> Table:
    """A trained model continued at several precisions: its loss before and after, in the layers of the case and in BF16, from BF16's."""
    rows = read(CONTINUED)
    by_run = {(row["case"], row["seed"]): row for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))

    def losses(case: str, measure: str) -> dict[int, float]:
        return {int(seed): float(row[measure]) for (name, seed), row in by_run.items() if name == case}

    def apart(case: str, measure: str) -> str:
        if case == cases[0]:
            return f"{statistics.fmean(losses(case, measure).values()):.4f} nats"
        return shown(paired_difference(losses(cases[0], measure), losses(case, measure)).relative)

    measures = {"before training, own layers": "start", "after, own layers": "own", "after, BF16 layers": "bf16"}
    lines = [[f"`{case}`", str(len(losses(case, "own"))), *(apart(case, name) for name in measures.values())] for case in cases]
    return Table(["precision", "seeds", *measures], lines, [(CONTINUED, rows)])


TABLES: dict[str, Callable[[], Table]] = {
    "outlier-losses": losses,
    "outlier-remedies": remedies,
    "guard-times": times,
    "continued": continued,
}
