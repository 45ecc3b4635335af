"""FP8-LM Table 8: memory of the least and the most loaded rank of the grid, computed from shapes; nothing is allocated.

Only model state is counted: weights, gradients and optimizer states. The paper measured whole processes including activations, so only
the spread, max - min, is comparable: it measures how evenly ZeRO loads the ranks.

| method | linear weights | embedding | norms, biases | partitioning |
| --- | --- | --- | --- | --- |
| zero-bf16 | 2 + 4, and 12 sharded | the same | the same | every buffer into equal parts, as Megatron-LM |
| greedy-whole | 1, and 6 sharded | 2, and 7 sharded | 2, and 16 sharded | Algorithm 1 over all tensors, each whole |
| greedy-cut | as greedy-whole | | | per bucket, tensors split: `msamp.comm.partition.plan_buckets` |

The table is in bytes per element. Sharded bytes are held by the owner only: FP32 master weight and moments (12); FP8 gradient, FP16 master
weight, E4M3 and FP16 moments (6); the same with a BF16 gradient (7); all in FP32 (16). The gradient of FP8 training is the reduced one.
Scales, a few bytes per tensor, buckets in flight, and local gradients that accumulate over micro-batches are not counted.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron.lm.config.presets import PRESETS
from msamp.comm.partition import Piece, partition, plan_buckets

GIB = 2**30
VOCABULARY, VOCABULARY_MULTIPLE = 50304, 128  # padded to a multiple of 128 x TP, as the trainer does
DATA_PARALLEL = {"7b": 32, "13b": 16, "175b": 4}
METHODS = {"zero-bf16": "BF16", "greedy-whole": "FP8 (Ours)", "greedy-cut": "FP8 (Ours)"}  # our method -> the paper's row


class StateBytes(NamedTuple):
    """Bytes per element of one kind of tensor in FP8 training."""

    replicated: int
    owned: int


FP8_BYTES = {"linear": StateBytes(1, 6), "embedding": StateBytes(2, 7), "small": StateBytes(2, 16)}
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


def divide(tensors: Tensors, dp: int, method: str) -> list[int]:
    """Partition a stage; return the bytes on each data-parallel rank."""
    if method == "zero-bf16":
        total = sum(map(math.prod, tensors.shapes))
        return [BF16_REPLICATED * total + BF16_SHARED * -(-total // dp)] * dp
    if method == "greedy-whole":
        return rank_bytes(tensors, partition(tensors.shapes, dp, limit=math.inf).pieces, dp)
    buckets = plan_buckets(tensors.shapes, tensors.kinds, dp).buckets
    return rank_bytes(tensors, [piece for bucket in buckets for piece in bucket.pieces], dp)


def spread(model: str, method: str) -> float:
    """Return the GiB by which the states of the most and the least loaded rank of the paper's grid differ."""
    size, dp = PRESETS[model], DATA_PARALLEL[model]
    tp, pp = size["tensor_model_parallel_size"], size["pipeline_model_parallel_size"]
    held = [
        gib
        for stage in sorted({0, 1, pp - 1} & set(range(pp)))  # all between first and last are the same
        for gib in divide(
            stage_tensors(size["num_layers"] // pp, size["hidden_size"], tp, embedding=stage in (0, pp - 1), final_norm=stage == pp - 1),
            dp,
            method,
        )
    ]
    return (max(held) - min(held)) / GIB
