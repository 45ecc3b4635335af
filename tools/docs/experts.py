"""The table of whole steps of a mixture of experts: OLMoE's shape in the trainer, on one card and on two."""

from collections.abc import Callable

from tools.docs.cells import BENCH, Table, column, kilo, of, pick
from tools.docs.evidence import Row

MOE = f"{BENCH}/moe.csv"
BASE = "O0"
GRAPHED = ", mock data"  # end of a case whose timed steps were all CUDA graphs
CARDS = {", two cards": 2}
WHOLE = ("6a0c496c", "aaa504b9")  # trees of the whole OLMoE and of its baselines


def graphed(row: Row) -> bool:
    """Return whether all timed steps of a row were CUDA graphs."""
    return row["case"].endswith(GRAPHED)


def cards(row: Row) -> int:
    """Return the number of cards of a case."""
    return next((count for words, count in CARDS.items() if words in row["case"]), 1)


def what(row: Row) -> str:
    """Return a case as the trainer's flags: a level, and how its experts are divided."""
    level, *rest = row["case"].removesuffix(GRAPHED).split(", ")
    flags = {"EP 2": "--expert-model-parallel-size 2"}
    words = [flags.get(part, part) for part in rest if part.startswith(("EP ", "--"))]
    return f"`{' '.join([level, *words])}`"


def steps() -> Table:
    """Whole steps in CUDA graphs: tokens/s of all cards together, and per card over O0 and over the same level on one card."""
    rows = pick(MOE, graphed)
    one = {row["case"].removesuffix(GRAPHED): float(row["tokens_s"]) for row in rows if cards(row) == 1}

    def over(row: Row, level: str) -> float:
        return float(row["tokens_s"]) / cards(row) / one[level]

    columns: dict[str, Callable[[Row], str]] = {
        "case": what, "cards": lambda row: f"{cards(row)} x {row['gpu'].removeprefix('NVIDIA ')}", "tokens/s, all cards": kilo("tokens_s"),
        "per card, times O0 on one card": lambda row: f"{over(row, BASE):.2f}",
        "% of as many single cards": lambda row: f"{100 * over(row, row['case'].split(',')[0]):.0f}",
        "peak GiB per card": column("peak_gib", 1),
    }  # fmt: skip
    return of(MOE, rows, columns)


def baselines() -> Table:
    """Steps of one card next to other libraries', by number of layers, with enwik8."""
    rows = sorted(pick(MOE, lambda row: row["model"] == "OLMoE" and row["commit"] in WHOLE), key=lambda row: -int(row["layers"]))
    columns: dict[str, Callable[[Row], str]] = {
        "layers": column("layers"), "case": lambda row: row["case"] if " " in row["case"] else f"`{row['case']}`",
        "tokens/s": kilo("tokens_s"), "peak GiB": column("peak_gib", 1), "commit": column("commit"),
    }  # fmt: skip
    return of(MOE, rows, columns)


TABLES: dict[str, Callable[[], Table]] = {"moe-steps": steps, "moe-baselines": baselines}
