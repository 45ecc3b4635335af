"""FP8-LM Table 8: memory of the least and the most loaded rank of the grid, computed from shapes; nothing is allocated.

    python tools/reproduce/table8.py --csv tools/reproduce/results/table8.csv

Only model state is counted: weights, gradients and optimizer states. The paper measured whole processes including activations, so only
the spread, max - min, is comparable: it measures how evenly ZeRO loads the ranks.

| method | linear weights | embedding | norms, biases | partitioning |
| --- | --- | --- | --- | --- |
| zero-bf16 | 2 + 4, and 12 sharded | the same | the same | every buffer into equal parts, as Megatron-LM |
| greedy-whole | 1, and 6 sharded | 2, and 7 sharded | 2, and 16 sharded | Algorithm 1 over all tensors, each whole |
| greedy-cut | as greedy-whole | | | per bucket, tensors split: `msamp.comm.partition.plan_buckets` |

The table is in bytes per element. Sharded bytes are held by the owner only: FP32 master weight and moments (12); FP8 gradient, FP16 master
weight, E4M3 and FP16 moments (6); the same with a BF16 gradient (7); all in FP32 (16). The gradient of FP8 training is the reduced one.
With several micro-batches every rank also accumulates its local gradients before the reduction (BF16; FP32 for norms and biases):
`accumulate_gib`. Megatron-LM accumulates in the FP32 gradient that is already counted. Scales, a few bytes per tensor, and buckets in
flight are not counted.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.lm.config.presets import PRESETS
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, output_file
from msamp.comm.partition import Piece, partition, plan_buckets
from tools.bench import rows

GIB = 2**30
VOCABULARY, VOCABULARY_MULTIPLE = 50304, 128  # padded to a multiple of 128 x TP, as the trainer does
DATA_PARALLEL = {"7b": 32, "13b": 16, "175b": 4}
MORE_RANKS = (64, 256, 1024)
MOST_RANKS = 4096  # greedy partitioning visits every rank for every tensor: seconds per model at this size
METHODS = {"zero-bf16": "BF16", "greedy-whole": "FP8 (Ours)", "greedy-cut": "FP8 (Ours)"}  # our method -> the paper's row
PAPER = {  # measured GB
    ("7b", "BF16"): (69.07, 69.63),
    ("7b", "FP8 (TE)"): (76.97, 77.28),
    ("7b", "FP8 (Ours)"): (49.06, 49.36),
    ("13b", "BF16"): (67.98, 68.18),
    ("13b", "FP8 (TE)"): (73.68, 76.36),
    ("13b", "FP8 (Ours)"): (48.45, 48.85),
    ("175b", "BF16"): (65.60, 66.12),
    ("175b", "FP8 (TE)"): (69.04, 69.57),
    ("175b", "FP8 (Ours)"): (38.64, 40.28),
}
COLUMNS = (
    "model",
    "tp",
    "pp",
    "dp",
    "method",
    "min_gib",
    "max_gib",
    "spread",
    "stage_spread",
    "accumulate_gib",
    "padding",
    "pieces",
    "paper_row",
    "paper_min_gb",
    "paper_max_gb",
    "paper_spread",
)


class StateBytes(NamedTuple):
    """Bytes per element of one kind of tensor in FP8 training."""

    replicated: int
    owned: int
    accumulated: int


FP8_BYTES = {"linear": StateBytes(1, 6, 2), "embedding": StateBytes(2, 7, 2), "small": StateBytes(2, 16, 4)}
BF16_REPLICATED, BF16_SHARED = 2 + 4, 12


class Tensors(NamedTuple):
    """Tensors on a rank of one pipeline stage in the order of backward: their shapes, and their kinds, keys of `FP8_BYTES`."""

    shapes: list[tuple[int, ...]]
    kinds: list[str]


def stage_tensors(layers: int, hidden: int, tp: int, *, embedding: bool = True, final_norm: bool = True) -> Tensors:
    """Return the parameters on one tensor-parallel rank of a GPT stage.

    The GPT has LayerNorm, biases, an MLP of 4 x hidden, a tied embedding, and no position embedding.
    """
    layer: list[tuple[tuple[int, ...], str]] = [
        ((hidden, 4 * hidden // tp), "linear"),
        ((hidden,), "small"),
        ((4 * hidden // tp, hidden), "linear"),
        ((4 * hidden // tp,), "small"),
        *[((hidden,), "small")] * 2,
        ((hidden, hidden // tp), "linear"),
        ((hidden,), "small"),
        ((3 * hidden // tp, hidden), "linear"),
        ((3 * hidden // tp,), "small"),
        *[((hidden,), "small")] * 2,
    ]
    multiple = VOCABULARY_MULTIPLE * tp
    rows = -(-VOCABULARY // multiple) * multiple // tp
    tensors = [((hidden,), "small")] * 2 * final_norm + layer * layers + [((rows, hidden), "embedding")] * embedding
    return Tensors([shape for shape, _ in tensors], [kind for _, kind in tensors])


def rank_bytes(tensors: Tensors, pieces: Sequence[Piece], dp: int) -> list[int]:
    """Return the bytes of model state on each data-parallel rank in FP8 training; `pieces` assigns the owners."""
    sizes = [math.prod(shape) for shape in tensors.shapes]
    held = [sum(size * FP8_BYTES[kind].replicated for size, kind in zip(sizes, tensors.kinds, strict=True))] * dp
    for piece in pieces:
        shape, kind = tensors.shapes[piece.tensor], tensors.kinds[piece.tensor]
        held[piece.owner] += piece.rows * math.prod(shape[1:]) * FP8_BYTES[kind].owned
    return held


def divide(tensors: Tensors, dp: int, method: str) -> tuple[list[int], float, int]:
    """Partition a stage; return the bytes on each data-parallel rank, the padding in elements, and the number of pieces."""
    if method == "zero-bf16":
        total = sum(map(math.prod, tensors.shapes))
        return [BF16_REPLICATED * total + BF16_SHARED * -(-total // dp)] * dp, 0.0, dp
    if method == "greedy-whole":
        whole = partition(tensors.shapes, dp, limit=math.inf)
        return rank_bytes(tensors, whole.pieces, dp), whole.padding, len(whole.pieces)
    plan = plan_buckets(tensors.shapes, tensors.kinds, dp)
    pieces = [piece for bucket in plan.buckets for piece in bucket.pieces]
    return rank_bytes(tensors, pieces, dp), plan.padding, len(pieces)


def accumulated(tensors: Tensors) -> int:
    """Return the bytes of the local gradients accumulated over several micro-batches in FP8 training."""
    return sum(math.prod(shape) * FP8_BYTES[kind].accumulated for shape, kind in zip(tensors.shapes, tensors.kinds, strict=True))


def row(model: str, dp: int, method: str) -> dict[str, Any]:
    """Return one row, over all ranks of the grid; padding, pieces and `stage_spread` (max - min in a stage) are the worst stage's."""
    size = PRESETS[model]
    tp, pp = size["tensor_model_parallel_size"], size["pipeline_model_parallel_size"]
    stages = [
        stage_tensors(size["num_layers"] // pp, size["hidden_size"], tp, embedding=stage in (0, pp - 1), final_norm=stage == pp - 1)
        for stage in sorted({0, 1, pp - 1} & set(range(pp)))  # all between first and last are the same
    ]
    divided = [divide(tensors, dp, method) for tensors in stages]
    least, most = min(min(held) for held, _, _ in divided), max(max(held) for held, _, _ in divided)
    paper_row = METHODS[method] if dp == DATA_PARALLEL[model] else ""
    columns: dict[str, Any] = grid(model, dp) | {"method": method}
    columns |= {"min_gib": f"{least / GIB:.3f}", "max_gib": f"{most / GIB:.3f}", "spread": f"{(most - least) / GIB:.3f}"}
    columns["stage_spread"] = f"{max(max(held) - min(held) for held, _, _ in divided) / GIB:.3f}"
    columns["accumulate_gib"] = "0.000" if method == "zero-bf16" else f"{max(map(accumulated, stages)) / GIB:.3f}"
    columns |= {"padding": f"{max(padding for _, padding, _ in divided):.4f}", "pieces": max(pieces for _, _, pieces in divided)}
    return columns | paper_columns(model, paper_row)


def grid(model: str, dp: int) -> dict[str, Any]:
    """Return the columns that identify the grid."""
    size = PRESETS[model]
    return {"model": model, "tp": size["tensor_model_parallel_size"], "pp": size["pipeline_model_parallel_size"], "dp": dp}


def paper_columns(model: str, paper_row: str) -> dict[str, str]:
    """Return the paper's figures; empty strings if `paper_row` is empty."""
    if not paper_row:
        return dict.fromkeys(COLUMNS[-4:], "")
    low, high = PAPER[model, paper_row]
    return dict(zip(COLUMNS[-4:], (paper_row, f"{low:.2f}", f"{high:.2f}", f"{high - low:.2f}"), strict=True))


def table(models: Sequence[str], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return all rows: each model at the paper's data-parallel size and at `ranks`."""
    rows = []
    for model in models:
        for dp in sorted({DATA_PARALLEL[model], *ranks}):
            rows += [row(model, dp, method) for method in METHODS]
            if dp == DATA_PARALLEL[model]:  # the paper's figures only; not computed here
                rows.append(dict.fromkeys(COLUMNS, "") | grid(model, dp) | {"method": "-"} | paper_columns(model, "FP8 (TE)"))
    return rows


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description="FP8-LM Table 8 from shapes: model state on the least and the most loaded rank.")
    parser.add_argument("--models", nargs="+", choices=DATA_PARALLEL, default=list(DATA_PARALLEL))
    parser.add_argument("--ranks", nargs="*", type=count(1, MOST_RANKS), default=MORE_RANKS, help="data-parallel sizes besides the paper's")
    parser.add_argument("--csv", type=output_file, help="file to write")
    options = parser.parse_args(arguments)
    lines = table(options.models, options.ranks)
    print("Model state (weights, gradients, optimizer) per rank without activations; the paper's GB include them: compare only spreads.")
    print(rows.aligned(COLUMNS, lines))
    if options.csv:
        rows.write(options.csv, COLUMNS, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
