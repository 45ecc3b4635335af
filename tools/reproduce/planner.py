"""The planner's predictions for FP8-LM's clusters of H100s with the paper's figures, written to `results/planner.csv`.

    python tools/reproduce/planner.py

what = table5      the grids of its Table 5: memory and samples/s
what = context     whether GPT-175B fits on 32 GPUs of 80 GB, by sequence length (section 3.3), without recomputation, on the grid of one
                   replica (TP x PP = 32) that takes least memory; TE has BF16's states

Takes some minutes and no GPU.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import PRESETS
from megatron.lm.planning import memory
from megatron.lm.planning.rates import Cluster, rates_of
from megatron.lm.planning.search import Planned, candidates, planned
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, output_file
from megatron.lm.tools.plan import NETWORK_GB_S
from tools.bench import rows
from tools.reproduce.entry import paper

GPU = "h100"
PAPER_GIB = 80e9 / 2**30  # the "80GB" of the data sheet; CUDA and NCCL allocate part of it
FILE = rows.ROOT / "tools/reproduce/results/planner.csv"
COLUMNS = ("what", "model", "precision", "gpus", "sequence", "grid", "micro_batch", "recompute", "gib", "ms", "samples_s", "tokens_s_gpu",
           "fits", "paper_gb", "paper_samples_s")  # fmt: skip
PRECISIONS = {"BF16": "bf16", "FP8": "O3"}  # the paper's name -> ours
# Table 5 of FP8-LM: model, GPUs, micro-batch, precision, memory in GB, samples/s.
TABLE_5 = tuple(
    (model, 128 if model == "175b" else 32, int(case.split()[1]), PRECISIONS[case.split()[0]], values[0], values[1])
    for model, rows_of in paper("fp8lm.table5.second").items()
    for case, values in rows_of.items()
    if case.split()[0] in PRECISIONS
)
CONTEXTS = (1024, 2048, 4096, 8192)


def cluster(gpus: int) -> Cluster:
    """Return a cluster of hosts with 8 H100s and a network adapter of 400 Gb/s per GPU."""
    rates = rates_of(GPU)
    return Cluster(gpus=gpus, per_host=8, link=rates("link"), network=NETWORK_GB_S * 1e9, latency=rates("latency"))


def configuration(model: str, precision: str, *flags: str) -> Any:
    """Return the configuration of a preset at a precision, with ZeRO."""
    common = ["--preset", model, "--precision", precision, "--use-distributed-optimizer", "--fp8-min-gain", "0", "--dry-run"]
    return parse_args([*common, *flags])


def row(what: str, model: str, one: Planned, gpus: int, **more: Any) -> dict[str, Any]:
    """Return the row of a planned grid."""
    config, parallel, training = one.config, one.config.parallel, one.config.training
    axes, batch = config.parallel.axes(gpus), config.global_batch_size(gpus)
    chunk = f" / {parallel.num_layers_per_virtual_pipeline_stage}" if parallel.num_layers_per_virtual_pipeline_stage else ""
    eager = " eager" if axes.pipeline > 1 and not one.step.captured else ""
    columns = {
        "what": what,
        "model": model,
        "precision": config.precision.name,
        "gpus": gpus,
        "sequence": config.model.seq_length,
        "grid": f"{axes.tensor} x {axes.pipeline}{chunk} x {axes.data}{eager}",
        "micro_batch": training.micro_batch_size,
        "recompute": training.recompute_granularity or "",
        "gib": round(one.fullest.total / memory.GIB, 2),
        "ms": round(1e3 * one.step.total, 1),
        "samples_s": round(batch / one.step.total, 1),
        "tokens_s_gpu": round(batch * config.model.seq_length / one.step.total / gpus),
    }
    return {column: (columns | more).get(column, "") for column in COLUMNS}


def table5(model: str, gpus: int, micro_batch: int, precision: str, gb: float, samples: float) -> dict[str, Any]:
    """Return the row of one line of the paper's Table 5, on its grid."""
    return row("table5", model, planned5(model, gpus, micro_batch, precision), gpus, paper_gb=gb, paper_samples_s=samples)


def planned5(model: str, gpus: int, micro_batch: int, precision: str) -> Planned:
    """Return the plan of a grid of the paper's Table 5."""
    return planned(configuration(model, precision, "--micro-batch-size", str(micro_batch)), cluster(gpus), rates_of(GPU))


def context(precision: str, sequence: int) -> dict[str, Any]:
    """Return the row of GPT-175B on 32 GPUs, on the grid of one replica that takes least memory."""
    batch = PRESETS["175b"]["global_batch_size"] * 2048 // sequence
    config = configuration("175b", precision, "--seq-length", str(sequence), "--global-batch-size", str(batch), "--micro-batch-size", "1")
    machines, grids = cluster(32), []
    for one in candidates(config, machines, ("micro_batch_size", "recompute_granularity", "num_layers_per_virtual_pipeline_stage")):
        if one.parallel.axes(32).model == 32:
            grids.append(planned(one, machines, rates_of(GPU)))
    leanest = min(grids, key=lambda one: one.fullest.total)
    fits = leanest.fullest.total + memory.RESERVED <= PAPER_GIB * memory.GIB
    return row("context", "175b", leanest, 32, fits="yes" if fits else "no")


def everything() -> Iterator[dict[str, Any]]:
    """Yield all rows."""
    for line in TABLE_5:
        yield table5(*line)
    for precision in ("bf16", "O2", "O3"):
        for sequence in CONTEXTS:
            yield context(precision, sequence)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: replace the rows of the CSV."""
    parser = Parser(description=__doc__)
    parser.add_argument("--csv", type=output_file, default=FILE, help="file to write (default: tools/reproduce/results/planner.csv)")
    options = parser.parse_args(argv)
    lines = []
    for line in everything():
        print(", ".join(f"{value}" for value in line.values()), flush=True)
        lines.append(line)
    rows.write(options.csv, COLUMNS, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
