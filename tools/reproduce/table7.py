"""FP8-LM Table 7: bytes that tensor and sequence parallelism send in BF16 and in FP8, computed from shapes and counted on GPUs.

    python tools/reproduce/table7.py --csv tools/reproduce/results/table7.csv

A transformer layer has two column-parallel linear layers (QKV, fc1) and two row-parallel ones (projection, fc2). With sequence parallelism
(FP8-LM section 2.3, Figure 2) each collective of such a layer moves a tensor [s b, h] that is sharded over t ranks. A rank sends

    (t - 1) / t  s b h   elements, 2 bytes each in BF16 and 1 in FP8

both in an all-gather (its shard to each other rank) and in a reduce-scatter (the others' shards of its partial sum). A column-parallel
layer gathers its input in forward, gathers it again in backward if the rank keeps only its shard, and reduce-scatters the input's
gradient: this is the scope of Table 7, 6 collectives per transformer layer in BF16. A row-parallel layer reduce-scatters its output and
gathers the output's gradient; together these are the 10 collectives of `all_gib`. GiB are per rank and micro-batch; `*_step_gib` are for
all micro-batches of a step.

The paper's figures match this. Its 4.7 and 5.9 "GB" of BF16 are the GiB of one micro-batch in this scope (4.69 and 5.91). Its 3.1 and 3.9
match FP8 all-gathers with a BF16 reduce-scatter: 2/3 (`the paper's FP8`), printed as -34 %. O3 also sends the gradients in FP8: 1/2. The
paper does not say what its g-bar sends. Not counted: embedding, LM head and loss, which are BF16 at every level, and pipeline stages.

The paper's `rate` is the share of a step's time that this communication takes. Shapes do not determine time: measured rows, from --grid,
contain the share of a step in which only NCCL kernels ran, of whatever collective (`exposed_share` of bench_grid.py), and counted bytes.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.config.presets import PRESETS
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, output_file, path
from msamp.numerics import recipe
from tools.bench import rows
from tools.reproduce.table8 import DATA_PARALLEL

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
LAYERS_OF_A_KIND = 2  # a transformer layer has 2 column-parallel and 2 row-parallel layers
BASELINE = "O0"
PAPER_SCHEME = "the paper's FP8"
PAPER = {  # rate in %, volume in GB
    ("13b", BASELINE): (12.9, 4.7),
    ("13b", PAPER_SCHEME): (5.3, 3.1),
    ("175b", BASELINE): (14.9, 5.9),
    ("175b", PAPER_SCHEME): (5.2, 3.9),
}
COLUMNS = (
    "source",
    "gpu",
    "model",
    "tp",
    "pp",
    "dp",
    "micro_batch",
    "micro_batches",
    "case",
    "scope_gib",
    "scope_change",
    "all_gib",
    "all_change",
    "scope_step_gib",
    "all_step_gib",
    "shapes_scope_gib",
    "shapes_all_gib",
    "exposed_share",
    "paper_gb",
    "paper_change",
    "paper_rate",
)
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


def computed_rows(model: str) -> list[dict[str, Any]]:
    """Compute the rows of one of the paper's models from its grid, batch and sequence length, for every scheme."""
    size, dp = PRESETS[model], DATA_PARALLEL[model]
    tp, pp, micro_batch = size["tensor_model_parallel_size"], size["pipeline_model_parallel_size"], size["micro_batch_size"]
    micro_batches = size["global_batch_size"] // (dp * micro_batch)
    common = {
        "source": "computed",
        "model": model,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "micro_batch": micro_batch,
        "micro_batches": micro_batches,
    }
    before = preset_volume(model, pp, tp, micro_batch, SCHEMES[BASELINE])
    computed = []
    for case, wire in SCHEMES.items():
        row = common | {"case": case} | sizes(preset_volume(model, pp, tp, micro_batch, wire), before, micro_batches)
        if (model, case) in PAPER:
            rate, volume_gb = PAPER[model, case]
            row |= {"paper_gb": volume_gb, "paper_change": change(volume_gb, PAPER[model, BASELINE][1]), "paper_rate": rate}
        computed.append(dict.fromkeys(COLUMNS, "") | row)
    return computed


def measured_rows(grid: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return a row for the last measurement by bench_grid.py of each case with sequence parallelism; changes are from O0 on its grid."""
    newest = latest(grid)
    measured = []
    for key, row in newest.items():
        plain = next((other for k, other in newest.items() if k[:-1] == key[:-1] and _baseline_of(row, other)), None)
        micro_batches = int(row["micro_batches"])
        scope, everything = shapes_of(row)
        shapes = {"shapes_scope_gib": f"{scope / GIB:.3f}", "shapes_all_gib": "" if everything is None else f"{everything / GIB:.3f}"}
        line = {"source": f"{row['date']} {row['commit']}", "gpu": f"{row['gpus']} x {row['gpu']}", "model": row["preset"]} | shapes
        line |= {name: row[name] for name in ("tp", "pp", "dp", "micro_batch", "micro_batches", "case", "exposed_share")}
        counted_before = None if plain is None else counted(plain)
        measured.append(dict.fromkeys(COLUMNS, "") | line | sizes(counted(row), counted_before, micro_batches))
    return measured


def latest(grid: Sequence[Mapping[str, str]]) -> dict[tuple[str, ...], Mapping[str, str]]:
    """Return the last row of each grid and case among our levels with sequence parallelism, where NCCL used direct links."""
    used = (row for row in grid if row["sp"] == "on" and row["level"] and row["p2p"] == "on")
    return {(*(row[name] for name in GRID), row["case"]): row for row in used}


SIZES = ("num_layers", "seq_length")


def given_sizes(row: Mapping[str, str]) -> dict[str, int]:
    """Return the layers and the length that the case of a row names."""
    words = row["case"].split()
    return {name: int(words[words.index(f"--{name.replace('_', '-')}") + 1]) for name in SIZES if f"--{name.replace('_', '-')}" in words}


def _baseline_of(row: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return other["level"] == BASELINE and given_sizes(other) == given_sizes(row)


def shapes_of(row: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the `preset_volume` of a row of bench_grid.py, with the layers and the length that its case names."""
    given = given_sizes(row)
    wire = scheme(row["level"], row["tp_wire"], "gathered" if "--tp-saved-input gathered" in row["case"] else "shard")
    return preset_volume(row["preset"], int(row["pp"]), int(row["tp"]), int(row["micro_batch"]), wire, given)


def counted(row: Mapping[str, str]) -> tuple[float, float]:
    """Return the bytes per micro-batch of a row of bench_grid.py: in the scope of Table 7, and in all collectives of the layers."""
    scope, output, grad_output = (float(row[name]) for name in ("table7_mib", "output_mib", "grad_output_mib"))
    unit = 2**20 / int(row["micro_batches"])
    return scope * unit, (scope + output + grad_output) * unit


def sizes(volumes: tuple[float, float | None], before: tuple[float, float | None] | None, micro_batches: int) -> dict[str, str]:
    """Return the columns for the bytes per micro-batch (scope, all) and their change from BF16's, `before`; None is unknown."""
    columns: dict[str, str] = {}
    for i, name in enumerate(("scope", "all")):
        value, plain = volumes[i], None if before is None else before[i]
        if value is None:
            continue
        columns |= {f"{name}_gib": f"{value / GIB:.3f}", f"{name}_step_gib": f"{value * micro_batches / GIB:.3f}"}
        columns[f"{name}_change"] = change(value, plain) if plain else ""
    return columns


def change(value: float, plain: float) -> str:
    """Format a relative change, as in `-50.0%`; empty if there is none."""
    return "" if value == plain else f"{100 * (value / plain - 1):+.1f}%"


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description="FP8-LM Table 7: bytes that tensor and sequence parallelism send in BF16 and in FP8.")
    parser.add_argument(
        "--grid", type=path, default=ROOT / "tools/bench/results/grid.csv", help="rows of bench_grid.py, read if the file exists"
    )
    parser.add_argument("--csv", type=output_file, help="file to write")
    options = parser.parse_args(arguments)
    table = [row for model in ("13b", "175b") for row in computed_rows(model)]
    if options.grid.exists():
        with options.grid.open(encoding="utf-8", newline="") as stream:
            table += measured_rows(list(csv.DictReader(stream)))
    print(
        "GiB that a rank sends per micro-batch: scope, as in the paper (all-gather of inputs, reduce-scatter of their gradients), and all."
    )
    print(rows.aligned(COLUMNS, table))
    if options.csv:
        rows.write(options.csv, COLUMNS, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
