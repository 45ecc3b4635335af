"""Tables of FP8 with outliers: what a run loses when channels of SwiGLU grow, with and without a remedy, and what the guard costs."""

from collections.abc import Callable

from tools.docs.cells import BENCH, Cell, Table, code, column, of, pick
from tools.docs.evidence import Row

LOSSES, TIMES = f"{BENCH}/outliers.csv", f"{BENCH}/guard.csv"
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


TABLES: dict[str, Callable[[], Table]] = {"outlier-losses": losses, "guard-times": times}
