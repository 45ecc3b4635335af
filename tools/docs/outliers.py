"""Tables of FP8 with outliers: what a run loses when channels of SwiGLU grow, with and without a remedy, what the guard costs, and what a
trained model with outliers loses that is continued at several precisions."""

import statistics
from collections.abc import Callable

from megatron.lm.evaluation.paired_difference import paired_difference
from tools.docs.cells import BENCH, REPRODUCE, Cell, Table, code, column, of, pick
from tools.docs.evidence import Row, read
from tools.docs.losses import shown

LOSSES, TIMES, CONTINUED = f"{BENCH}/outliers.csv", f"{BENCH}/guard.csv", f"{REPRODUCE}/smollm2/continued.csv"
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
    found = {(row["case"], row["seed"]): row for row in rows}
    cases = list(dict.fromkeys(row["case"] for row in rows))

    def losses(case: str, measure: str) -> dict[int, float]:
        return {int(seed): float(row[measure]) for (name, seed), row in found.items() if name == case}

    def apart(case: str, measure: str) -> str:
        if case == cases[0]:
            return f"{statistics.fmean(losses(case, measure).values()):.4f} nats"
        return shown(paired_difference(losses(cases[0], measure), losses(case, measure)).relative)

    measures = {"before training, own layers": "start", "after, own layers": "own", "after, BF16 layers": "bf16"}
    lines = [[f"`{case}`", str(len(losses(case, "own"))), *(apart(case, name) for name in measures.values())] for case in cases]
    return Table(["precision", "seeds", *measures], lines, [(CONTINUED, rows)])


TABLES: dict[str, Callable[[], Table]] = {"outlier-losses": losses, "guard-times": times, "continued": continued}
