"""Tables of long sequences: whole steps of a model whose sequences are split over two GPUs, and attention alone."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tools.docs.cells import BENCH, Table, code, column, kilo, of, pick
from tools.docs.evidence import Row

GRID, CONTEXT = f"{BENCH}/grid.csv", f"{BENCH}/context.csv"
BASE = "O0"
SINCE = ("757f8790", "528f309d", "6a0c496c")  # one day's runs on cards of one kind
LAYERS = "--num-layers 8"
# How long a window of amaxes is changes how many of the first steps are slower, and no step after them.
UNSHOWN = ("--num-layers", "--seq-length", "--max-position-embeddings", "--micro-batch-size", "--fp8-amax-history-len")
LINK = {"on": "NVLink", "off": "host memory"}  # by NCCL's use of direct links


def words(row: Row) -> list[str]:
    return row["case"].split()


def tokens(row: Row) -> int:
    """Return the sequence length of a case."""
    return int(words(row)[words(row).index("--seq-length") + 1])


def flags(row: Row) -> str:
    """Return a case without the model's shape and the length of the window of amaxes."""
    left, skip = [], False
    for word in words(row):
        if not skip and word not in UNSHOWN:
            left.append(word)
        skip = word in UNSHOWN
    return f"`{' '.join(left)}`"


def newest(rows: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]) -> list[Row]:
    """Return the last row of each key, in the order in which the keys first occur."""
    return list({key(row): row for row in rows}.values())


def steps() -> Table:
    """Steps of 8 layers of Llama-3-8B on two GPUs by sequence length, each next to the fastest BF16 of its length over the same link."""
    rows = newest(pick(GRID, lambda row: row["commit"] in SINCE and LAYERS in row["case"]), lambda row: (*where(row), flags(row)))
    rows.sort(key=where)
    best = {
        place: max(float(row["tokens_s_gpu"]) for row in rows if where(row) == place and row["level"] == BASE) for place in map(where, rows)
    }
    columns: dict[str, Callable[[Row], str]] = {
        "tokens": lambda row: f"{tokens(row):,}", "link": link, "case": flags, "ms/step": column("ms", 0),
        "tokens/s/GPU": kilo("tokens_s_gpu"),
        "times the fastest BF16": lambda row: f"{float(row['tokens_s_gpu']) / best[where(row)]:.2f}",
        "peak GiB": column("peak_gib_max", 1), "activations sent, MiB": column("activation_mib", 0),
    }  # fmt: skip
    return replace(of(GRID, rows, columns), note="Random tokens, update included, CUDA graphs.")


def link(row: Row) -> str:
    return LINK[row["p2p"]]


def where(row: Row) -> tuple[int, str]:
    """Return sequence length and link of a step; those with NVLink come first."""
    return tokens(row), link(row)


def attention() -> Table:
    """Causal attention alone over sequences that two GPUs share, the newest run of each case."""

    def key(row: Row) -> tuple[Any, ...]:
        return int(row["tokens"]), link(row), row["case"]

    rows = newest(pick(CONTEXT, lambda row: row["pass"] == "forward and backward"), key)
    rows.sort(key=lambda row: key(row)[:2])
    forward = {key(row): row for row in pick(CONTEXT, lambda row: row["pass"] == "forward")}
    columns: dict[str, Callable[[Row], str]] = {
        "case": code("case"), "tokens": lambda row: f"{int(row['tokens']):,}", "link": link,
        "ms forward": lambda row: f"{float(forward[key(row)]['ms']):.1f}", "ms forward and backward": column("ms", 1),
        "sent MiB": column("sent_mib", 0),
        "SQNR dB of o, dq, dk, dv": lambda row: ", ".join(row[f"sqnr_{name}"] for name in ("o", "dq", "dk", "dv")),
    }  # fmt: skip
    return of(CONTEXT, rows, columns)


TABLES: dict[str, Callable[[], Table]] = {"long-sequences": steps, "long-attention": attention}
