"""The published figures: the numbers of each, which are stored next to it as JSON, and the function of `drawing` that draws them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.docs import gradient_sums, losses
from tools.docs.cells import PEERS, PRECISIONS, pick
from tools.docs.drawing import Numbers, draw_bars, draw_curves, draw_lines, draw_ranges
from tools.docs.evidence import Row
from tools.docs.tables import H200, STEP, best_and_same_run
from tools.reproduce.sum_orders import CHAIN

# How the steps of the rows ran: ours replay CUDA graphs, Megatron-core and layers of Transformer Engine cannot.
GRAPHS, EAGER, COMPILED = "CUDA graphs", "eager", "compiled"
LARGE = ("O0", "O2", "O3", "te-bf16", "te-delayed")  # rows of GPT-7B
LLAMA = "8136b16"  # commit of the rows of Llama-3-8B's layers, ours and the baselines' together


@dataclass(frozen=True)
class Figure:
    """A figure to publish: its numbers, how they are drawn, and the rows that they come from, by file."""

    numbers: Numbers
    draw: Callable[[Numbers, Path], None]
    sources: Sequence[tuple[str, Sequence[Row]]]


def speed_and_memory() -> Figure:
    """Tokens/s and peak memory of the levels and baselines on one H200: the fastest steps of GPT-1.3B, GPT-7B at micro-batch 2, and eight
    layers of Llama-3-8B measured back to back."""
    seven = pick(STEP, lambda row: (row["gpu"], row["preset"].split()[0], row["micro_batch"]) == (H200, "7b", "2"))
    large = [max((row for row in seven if row["case"] == case), key=lambda row: int(row["tokens_s_gpu"])) for case in LARGE]
    llama = pick(STEP, lambda row: row["commit"] == LLAMA and "--num-layers 8" in row["preset"])
    models = {
        "GPT-1.3B, sequence 2,048, micro-batch 4, one H200, fastest recorded": [best for best, _ in best_and_same_run()],
        "GPT-7B, sequence 2,048, micro-batch 2, one H200, fastest recorded": large,
        "8 of 32 layers of Llama-3-8B, sequence 8,192, one H200, measured back to back": llama,
    }
    numbers = {
        model: {
            "names": [f"{short_name(row['case'])}, {how(row['case'])}" for row in rows],
            "tokens_s": [int(row["tokens_s_gpu"]) for row in rows],
            "peak_gib": [float(row["peak_gib"]) for row in rows],
        }
        for model, rows in models.items()
    }
    return Figure(numbers, draw_bars, [(STEP, [row for rows in models.values() for row in rows])])


def short_name(case: str) -> str:
    """Return the name of a case in a figure."""
    if case.startswith("te-"):
        return {"te-bf16": "TE's layers, BF16", "te-delayed": "TE's layers, FP8"}[case]
    for long, short in (("Megatron-core + TE", "Megatron + TE"), ("torch.compile + torchao", "torchao"), ("torch.compile", "PyTorch")):
        if PEERS.get(case, "").startswith(long):
            return PEERS[case].replace(long, short).replace(" delayed", "").replace(" tensorwise", "")
    return case.replace(" --attention-precision fp8 --output-layer-precision fp8", " + FP8 attention, head")


def how(case: str) -> str:
    """Return how the steps of a case ran: as CUDA graphs, eager or compiled."""
    if case.startswith(("megatron", "te-")):
        return EAGER
    return COMPILED if case in PEERS else GRAPHS


def precisions() -> Figure:
    """Validation loss of every precision, with the range of its seeds."""
    rows = pick(PRECISIONS)
    keys = {"names": "precision", "loss": "valid_loss", "least": "least", "most": "most"}
    numbers = {name: [row[key] if key == "precision" else float(row[key]) for row in rows] for name, key in keys.items()}
    return Figure(numbers, draw_ranges, [(PRECISIONS, rows)])


def fig7() -> Figure:
    """SNR of the averaged gradient by the number of ranks, for each scaling that prevents overflow of the sum."""
    rows = pick(gradient_sums.FIG7, lambda row: row["order"] == CHAIN)
    ranks = sorted({int(row["dp"]) for row in rows})
    numbers: Numbers = {"ranks": ranks, "snr_db": {}}
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        per_ranks = ([row for row in rows if row["dp"] == str(count)] for count in ranks)
        numbers["snr_db"][strategy] = [round(next(iter(gradient_sums.means(some, strategy)))[1], 4) for some in per_ranks]
    return Figure(numbers, draw_lines, [(gradient_sums.FIG7, rows)])


def curves() -> Figure:
    """Validation loss while training, against BF16 of the same seeds."""
    tokens, apart = losses.differences()
    numbers: Numbers = {
        "tokens": tokens,
        "against_bf16": {name: [[round(x, 8) for x in triple] for triple in triples] for name, triples in apart.items()},
    }
    return Figure(numbers, draw_curves, [(PRECISIONS, losses.rows_of_precisions([losses.BASE, *apart]))])


FIGURES: dict[str, Callable[[], Figure]] = {
    "speed_and_memory": speed_and_memory,
    "precisions": precisions,
    "curves": curves,
    "fig7": fig7,
}
