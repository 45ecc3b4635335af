"""Tables of FP8 gradients summed over ranks: FP8-LM's Figure 7, and the same sums in other orders."""

import statistics
from collections.abc import Iterable, Sequence

from tools.docs.cells import MARK, REPRODUCE, Table, pick
from tools.docs.evidence import Row, marked
from tools.reproduce.sum_orders import CHAIN, ORDERS

FIG7, FIG7_ENTRY = (f"{REPRODUCE}/{name}.csv" for name in ("fig7/fig7", "entries/fp8lm-figure7"))


def over_ranks(dp: str = "128") -> Table:
    """Gradient scaling over many ranks: means over the blocks."""
    rows = pick(FIG7, lambda row: (row["dp"], row["order"]) == (dp, CHAIN))
    cells = [[name, *(text for text, _ in means(rows, name))] for name in dict.fromkeys(row["strategy"] for row in rows)]
    columns = [f"DP {dp}", "SNR dB", "underflow %, reduced", "underflow %, sent", "overflow %, reduced", "overflow %, sent"]
    return Table(columns, cells, [(FIG7, rows)])


def by_order() -> Table:
    """SNR of the average over 128 ranks by the order of the additions, on a small GPT: one row of the entry's small size per scaling."""
    rows = pick(
        FIG7_ENTRY, lambda row: row["size"] == "small" and row["quantity"].endswith(": SNR") and row["quantity"].startswith("DP 128, ")
    )
    by_name = {row["quantity"].removeprefix("DP 128, ").removesuffix(": SNR"): row for row in rows}
    strategies = [name for name in by_name if ", added as " not in name]
    orders = {CHAIN: "", **{order: f", added as {order}" for order in ORDERS if order != CHAIN}}
    cells = []
    for name in strategies:
        values = (by_name.get(name + suffix) for suffix in orders.values())
        cells.append(
            [name + (MARK if marked(by_name[name]) else ""), *("" if row is None else f"{float(row['ours']):.1f}" for row in values)]
        )
    return Table(["SNR dB, DP 128", *orders], cells, [(FIG7_ENTRY, list(by_name.values()))])


def means(rows: Sequence[Row], strategy: str) -> Iterable[tuple[str, float]]:
    """Yield the mean of each measure over the blocks, as text and as a number."""
    keys = (
        ("snr_db", 1.0, 1),
        ("underflow", 100.0, 3),
        ("underflow_local", 100.0, 3),
        ("overflow", 100.0, 4),
        ("overflow_local", 100.0, 4),
    )
    for key, scale, digits in keys:
        mean = scale * statistics.fmean(float(row[key]) for row in rows if row["strategy"] == strategy)
        yield f"{mean:.{digits}f}", mean
