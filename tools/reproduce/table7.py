"""FP8-LM Table 7: bytes that tensor and sequence parallelism send in BF16 and in FP8, computed from shapes and counted on GPUs.

A transformer layer has two column-parallel linear layers (QKV, fc1) and two row-parallel ones (projection, fc2). With sequence parallelism
(FP8-LM section 2.3, Figure 2) each collective of such a layer moves a tensor [s b, h] that is sharded over t ranks. A rank sends

    (t - 1) / t  s b h   elements, 2 bytes each in BF16 and 1 in FP8

both in an all-gather (its shard to each other rank) and in a reduce-scatter (the others' shards of its partial sum). A column-parallel
layer gathers its input in forward, gathers it again in backward if the rank keeps only its shard, and reduce-scatters the input's
gradient: this is the scope of Table 7, 6 collectives per transformer layer in BF16. A row-parallel layer reduce-scatters its output and
gathers the output's gradient; together these are the 10 collectives of `volume`.

The paper's figures match this. Its 4.7 and 5.9 "GB" of BF16 are the GiB of one micro-batch in this scope (4.69 and 5.91). Its 3.1 and 3.9
match FP8 all-gathers with a BF16 reduce-scatter: 2/3 (`the paper's FP8`), printed as -34 %. O3 also sends the gradients in FP8: 1/2. The
paper does not say what its g-bar sends. Not counted: embedding, LM head and loss, which are BF16 at every level, and pipeline stages.

The paper's `rate` is the share of a step's time that this communication takes. Shapes do not determine time: rows of `bench_grid.py`
contain the share of a step in which only NCCL kernels ran, of whatever collective, and counted bytes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.lm.config.presets import PRESETS
from msamp.numerics import recipe

LAYERS_OF_A_KIND = 2  # a transformer layer has 2 column-parallel and 2 row-parallel layers
BASELINE, PAPER_SCHEME = "O0", "the paper's FP8"
GRID = ("preset", "tp", "pp", "vpp", "dp", "micro_batch", "micro_batches", "gpus", "p2p", "gpu")  # equal in rows that are compared


class Scheme(NamedTuple):
    """Bytes per element in each collective of a layer; 0 if the layer does not run it, None if unknown."""

    input: int
    input_again: int
    grad_input: int
    output: int | None
    grad_output: int | None


def scheme(level: str, tp_wire: str = "bf16", saved_input: str = "shard") -> Scheme:
    """Return the bytes per element that a level sends: O1 and O2 gather FP8, and their partial sums are BF16.

    Raises:
        ValueError: an unknown level.
    """
    sent = recipe.by_name(level)
    if sent.gathers_fp8:
        partial = 1 if sent.fp8_wire else 2
        return Scheme(1, int(saved_input == "shard"), partial, 1 if sent.fp8_wire and tp_wire == "fp8" else 2, 1)
    return Scheme(2, 2, 2, 2, 2)


SCHEMES = {
    BASELINE: scheme(BASELINE),
    PAPER_SCHEME: Scheme(1, 1, 2, None, None),
    "O1, O2": scheme("O2"),
    "O3": scheme("O3"),
    "O3 --tp-wire fp8": scheme("O3", tp_wire="fp8"),
    "O3 --tp-wire fp8 --tp-saved-input gathered": scheme("O3", tp_wire="fp8", saved_input="gathered"),
}


def volume(layers: int, hidden: int, tokens: int, tp: int, wire: Scheme) -> tuple[int, int | None]:
    """Return the bytes that a rank sends per micro-batch with sequence parallelism: in the scope of Table 7, and in all collectives.

    Args:
        layers: transformer layers on the rank.
        hidden: width of the residual stream.
        tokens: tokens of the micro-batch, a multiple of `tp`.
        tp: tensor-parallel ranks.
        wire: bytes per element; if one of them is unknown, the second result is None.
    """
    elements = layers * LAYERS_OF_A_KIND * (tokens // tp * (tp - 1) * hidden)
    scope = elements * (wire.input + wire.input_again + wire.grad_input)
    if wire.output is None or wire.grad_output is None:
        return scope, None
    return scope, scope + elements * (wire.output + wire.grad_output)


def preset_volume(
    model: str, pp: int, tp: int, micro_batch: int, wire: Scheme, given: Mapping[str, int] | None = None
) -> tuple[int, int | None]:
    """Return the `volume` of a preset; `given`: sizes that replace its own."""
    size = {**PRESETS[model], **(given or {})}
    return volume(size["num_layers"] // pp, size["hidden_size"], micro_batch * size["seq_length"], tp, wire)


def of_model(model: str) -> dict[str, int]:
    """Return the bytes of Table 7's scope that a rank sends per micro-batch of one of the paper's models, for every scheme."""
    size = PRESETS[model]
    tp, pp, micro_batch = size["tensor_model_parallel_size"], size["pipeline_model_parallel_size"], size["micro_batch_size"]
    return {case: preset_volume(model, pp, tp, micro_batch, wire)[0] for case, wire in SCHEMES.items()}


def latest(grid: Sequence[Mapping[str, str]]) -> dict[tuple[str, ...], Mapping[str, str]]:
    """Return the last row of each grid and case among our levels with sequence parallelism, where NCCL used direct links."""
    used = (row for row in grid if row["sp"] == "on" and row["level"] and row["p2p"] == "on")
    return {(*(row[name] for name in GRID), row["case"]): row for row in used}


def shapes_of(row: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the `preset_volume` of a row of bench_grid.py, with the layers and the length that its case names."""
    words, sizes = row["case"].split(), {"--num-layers": "num_layers", "--seq-length": "seq_length"}
    given = {name: int(words[words.index(flag) + 1]) for flag, name in sizes.items() if flag in words}
    wire = scheme(row["level"], row["tp_wire"], "gathered" if "--tp-saved-input gathered" in row["case"] else "shard")
    return preset_volume(row["preset"], int(row["pp"]), int(row["tp"]), int(row["micro_batch"]), wire, given)


def counted(row: Mapping[str, str]) -> tuple[float, float]:
    """Return the bytes per micro-batch of a row of bench_grid.py: in the scope of Table 7, and in all collectives of the layers."""
    scope, output, grad_output = (float(row[name]) for name in ("table7_mib", "output_mib", "grad_output_mib"))
    unit = 2**20 / int(row["micro_batches"])
    return scope * unit, (scope + output + grad_output) * unit
