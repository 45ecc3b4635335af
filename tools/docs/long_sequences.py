"""Tables of long sequences: whole steps of a model whose sequences are split over two GPUs, and attention alone."""

from collections.abc import Callable
from dataclasses import replace

from tools.docs.cells import BENCH, Table, code, column, kilo, of, pick
from tools.docs.evidence import Row

GRID, CONTEXT = f"{BENCH}/grid.csv", f"{BENCH}/context.csv"
BASE = "O0"
SINCE = ("757f8790", "528f309d")  # one day's runs on cards of one kind


def words(row: Row) -> list[str]:
    return row["case"].split()


def tokens(row: Row) -> int:
    """Return the sequence length of a case."""
    return int(words(row)[words(row).index("--seq-length") + 1])


def flags(row: Row) -> str:
    """Return a case without the model's shape."""
    shape, left, skip = ("--num-layers", "--seq-length", "--max-position-embeddings", "--micro-batch-size"), [], False
    for word in words(row):
        if not skip and word not in shape:
            left.append(word)
        skip = word in shape
    return f"`{' '.join(left)}`"


def steps() -> Table:
    """Steps of 8 layers of Llama-3-8B on two GPUs by sequence length, each next to the fastest BF16 of its length."""
    rows = sorted(pick(GRID, lambda row: row["commit"] in SINCE and "--seq-length" in row["case"]), key=tokens)
    best = {
        length: max(float(row["tokens_s_gpu"]) for row in rows if tokens(row) == length and row["level"] == BASE)
        for length in map(tokens, rows)
    }
    columns: dict[str, Callable[[Row], str]] = {
        "tokens": lambda row: f"{tokens(row):,}", "case": flags, "ms/step": column("ms", 0), "tokens/s/GPU": kilo("tokens_s_gpu"),
        "times the fastest BF16": lambda row: f"{float(row['tokens_s_gpu']) / best[tokens(row)]:.2f}",
        "peak GiB": column("peak_gib_max", 1), "activations sent, MiB": column("activation_mib", 0),
    }  # fmt: skip
    return replace(of(GRID, rows, columns), note="Random tokens, update included, CUDA graphs.")


def attention() -> Table:
    """Causal attention alone over sequences that two GPUs share."""
    rows = pick(CONTEXT, lambda row: row["pass"] == "forward and backward")
    forward = {(row["case"], row["tokens"]): row for row in pick(CONTEXT, lambda row: row["pass"] == "forward")}
    columns: dict[str, Callable[[Row], str]] = {
        "case": code("case"), "tokens": column("tokens"), "ms forward": lambda row: forward[row["case"], row["tokens"]]["ms"],
        "ms forward and backward": column("ms"), "sent MiB": column("sent_mib", 0), "SQNR dB of o, dq, dk, dv": lambda row: ", ".join(
            row[f"sqnr_{name}"] for name in ("o", "dq", "dk", "dv")),
    }  # fmt: skip
    return of(CONTEXT, rows, columns)


TABLES: dict[str, Callable[[], Table]] = {"long-sequences": steps, "long-attention": attention}
