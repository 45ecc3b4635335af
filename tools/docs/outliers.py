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
    """Steps of GPT-125M with SwiGLU: the guard's measured and unmeasured steps, and Smooth-SwiGLU."""
    rows = pick(TIMES)
    plain = {row["case"]: float(row["ms"]) for row in rows if " " not in row["case"]}

    def slower(row: Row) -> str:
        level, _, flags = row["case"].partition(" ")
        return f"{100 * (float(row['ms']) / plain[level] - 1):+.1f}" if flags else ""

    columns = {"case": code("case"), "ms/step": column("ms", 1), "% from the level alone": slower, "peak GiB": column("peak_gib", 2)}
    return of(TIMES, rows, columns)


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
