"""Compare the planner with every measurement of whole steps on one to four GPUs: predicted, measured and relative error.

    python tools/bench/check_plan.py

Measurements that a rate was derived from (`FITTED`) are listed separately, and so are later measurements of the same runs and rows of trees
that computed differently from today's. `docs/results/planner.md` has a summary.
"""

import functools
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import PRESETS
from megatron.lm.config.sections.parallel import ParallelConfig
from megatron.lm.planning.memory import GIB, plan
from megatron.lm.planning.rates import GPUS, Cluster, rates_of
from megatron.lm.planning.time import predict
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser
from tools.measurements import Row, read
from tools.precisions import precision_flags

STEP, GRID, PARALLEL, MOE = (f"tools/bench/results/{name}.csv" for name in ("step", "grid", "data_parallel", "moe"))
COAT_MEMORY, TP = "tools/reproduce/results/coat_memory.csv", "O3 --tensor-model-parallel-size 2 --sequence-parallel"
# Whole steps that a rate of `rates.csv` was derived from: file, commit, case, micro-batch.
FITTED = (
    (STEP, "d77a990", "O3", "4"),
    (STEP, "d77a990", "O2", "4"),
    (STEP, "130f7fa", "O2", "4"),
    (STEP, "130f7fa", "O2+tensorwise", "4"),
    (STEP, "130f7fa", "O2+blockwise", "4"),
    (STEP, "484bfc7", "O3", "4"),
    (STEP, "484bfc7", "O3 --save-activations coat", "4"),
    (STEP, "fb6e7d2", "O0", "4"),
    (STEP, "fb6e7d2", "O3", "4"),
    (COAT_MEMORY, "de29eee", "bf16", "4"),
    (COAT_MEMORY, "de29eee", "bf16", "8"),
    (STEP, "2c95adf", "O0", "4"),
    (STEP, "2c95adf", "O0", "8"),
    (PARALLEL, "d2fde52", "O3", "4"),
    (MOE, "757f8790", "O0, mock data", "1"),
    (STEP, "3ce29b82", "O3", "4"),
    (STEP, "3ce29b82", "O2", "4"),
    (GRID, "5fa3333b", TP, "8"),
    (GRID, "3ce29b82", f"{TP} --tp-transport nccl", "8"),
)
MEMORY_LIMIT, TIME_LIMIT = 3.0, 15.0  # percent
# Trees without fused layers and without CUDA graphs of steps: their O1 to O3 ran another program.
EARLIER = ("fb6e7d2", "ba5f0e1", "35e0ef0", "b39cb72", "0e5ed93", "f13da06")
# Until this day, and in this tree, torch's operations rotated queries and keys in layers that are not fused.
ROTATED_BY_TORCH = ("2026-11-24", "2575da6")
# Until then O1 and O2 sent BF16 between tensor-parallel ranks, their layers were not fused there, and neither were layers with norms of
# queries and keys. Rows with pipeline stages and without --cuda-graph ran eager steps up to and including this day.
FUSED_EVERYWHERE = "2026-11-26"
AUTO_TRANSPORT = "2026-11-25"  # from this day on, a row without --tp-transport ran with auto; before, with nccl
# Trees whose rows with experts are of eager steps, or of steps that all count the gradients' statistics.
EAGER_EXPERTS = ("6f1e70bc",)
PEERS = ("megatron", "torchao", "llama ", "te-", "transformers")  # how the cases of other libraries begin
CONTEXT = "--context-parallel-size"
MIXTURES = {"OLMoE": "olmoe-1b-7b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}  # presets of the rows with experts


@dataclass(frozen=True)
class Compared:
    """A measurement and the planner's prediction: GiB of the fullest process, and ms."""

    file: str
    row: Row
    gib: float
    ms: float

    @property
    def measured_gib(self) -> float | None:
        """Peak of the fullest process; None if it was not measured."""
        text = self.row.get("peak_gib") or self.row.get("peak_gib_max") or ""
        return float(text) if text else None

    @property
    def memory_error(self) -> float | None:
        """Percent of the measured."""
        return None if self.measured_gib is None else 100 * (self.gib / self.measured_gib - 1)

    @property
    def time_error(self) -> float:
        """Percent of the measured median."""
        return 100 * (self.ms / float(self.row["ms"]) - 1)

    @functools.cached_property
    def kind(self) -> str:
        """Whether a rate was derived from this row (`fitted`), from the same run at another commit (`repeated`) or from neither (`judged`);
        `earlier` if its tree computed differently."""
        if self.row["commit"] in EARLIER or computed_otherwise(self.row):
            return "earlier"
        if is_fitted(self.file, self.row):
            return "fitted"
        return "repeated" if _what(self.row) in _fitted_runs() else "judged"


def computed_otherwise(row: Row) -> bool:
    """Return whether the tree of a row rotated by torch, sent BF16 or left layers unfused where today's does not."""
    config, (day, last) = configuration(row), ROTATED_BY_TORCH
    recipe, several = config.precision.recipe, config.parallel.tensor_model_parallel_size > 1
    rotated_by_torch = not config.fuses_layers and (row["date"] < day or row["commit"] == last)
    wide_sums = several and recipe.gathers_fp8 and not recipe.fp8_wire
    unfused_heads = config.model.qk_layernorm and config.fuses_layers
    return rotated_by_torch or ((wide_sums or unfused_heads) and row["date"] < FUSED_EVERYWHERE)


def configuration(row: Row) -> Config:
    """Return the configuration of a measured run."""
    case = row["case"] if row["preset"].partition(" ")[0] not in MIXTURES.values() else _in_flags(row["case"])
    level, _, rest = case.partition(" (")[0].partition(" ")
    preset, *of_all = shlex.split(row["preset"])
    flags = ["--preset", preset, *precision_flags(level), "--fp8-min-gain", "0", "--train-iters", "10000"]
    flags += ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    flags += ["--no-sequence-parallel"] if PRESETS[preset]["sequence_parallel"] else []
    words = shlex.split(rest.replace("selective mlp", "--recompute-granularity selective --recompute-modules mlp"))
    parallel = ParallelConfig(
        tensor_model_parallel_size=int(row.get("tp") or 1),
        pipeline_model_parallel_size=int(row.get("pp") or 1),
        context_parallel_size=int(words[words.index(CONTEXT) + 1]) if CONTEXT in words else 1,  # the rows have no column for it
    )
    copies = parallel.axes(int(row.get("gpus") or 1)).data
    batch = int(row["micro_batch"]) * copies * int(row.get("micro_batches") or 1)
    flags += ["--global-batch-size", str(batch), *words, *of_all, "--micro-batch-size", row["micro_batch"]]
    if row["commit"] in EARLIER:
        flags += ["--cuda-graph", "none"]
    if row["date"] <= FUSED_EVERYWHERE and parallel.pipeline_model_parallel_size > 1:
        flags = ["--cuda-graph", "none", *flags]
    if row["date"] < AUTO_TRANSPORT:
        flags = ["--tp-transport", "nccl", *flags]
    return parse_args(flags)


def _in_flags(case: str) -> str:
    """Return the level and flags of a case of the rows with experts: "O3, two cards, EP 2, --moe-wire fp8-sums, mock data"."""
    level, *parts = case.split(", ")
    words = [f"--expert-model-parallel-size {part[3:]}" for part in parts if part.startswith("EP ")]
    return " ".join([level, *words, *(part for part in parts if part.startswith("--"))])


def is_fitted(file: str, row: Row) -> bool:
    """Return whether a rate was derived from a row."""
    of_rates = row["preset"] == "1.3b" or file == MOE
    return (file, row["commit"], row["case"], row["micro_batch"]) in FITTED and of_rates


def _what(row: Row) -> tuple[Config, int]:
    """Return what a row ran, independent of its name."""
    config = configuration(row)
    return replace(config, precision=replace(config.precision, precision=config.precision.name)), int(row.get("gpus") or 1)


@functools.cache
def _fitted_runs() -> frozenset[tuple[Config, int]]:
    return frozenset(_what(row) for file, row in rows() if is_fitted(file, row) and row["commit"] not in EARLIER)


def compare(file: str, row: Row) -> Compared:
    """Compare a row with its prediction."""
    config, rates = configuration(row), rates_of(next(kind for kind, gpu in GPUS.items() if row["gpu"].startswith(gpu.name)))
    gpus = int(row.get("gpus") or 1)
    cluster = Cluster(gpus=gpus, per_host=8, link=rates("link"), network=rates("link"), latency=rates("latency"))
    ranks = plan(config, gpus)
    return Compared(file, row, max(rank.total for rank in ranks) / GIB, 1e3 * predict(config, cluster, rates, ranks).total)


def rows() -> Iterator[tuple[str, Row]]:
    """Yield our whole steps on GPUs of one host with NVLink, since links without it have no rate."""
    for file in (STEP, COAT_MEMORY, GRID, PARALLEL):
        for row in read(file):
            if row["ms"] and not row["case"].startswith(PEERS) and row.get("p2p", "on") != "off":
                yield file, row
    for row in read(MOE):
        if row["commit"] not in EAGER_EXPERTS and not row["case"].lower().startswith(PEERS):
            cards = 2 if "two cards" in row["case"] else 1
            tokens = cards * math.prod(int(row[key]) for key in ("micro_batch", "micro_batches", "seq_length"))
            ms = 1e3 * tokens / float(row["tokens_s"])
            yield MOE, {**row, "preset": f"{MIXTURES[row['model']]} --num-layers {row['layers']}", "gpus": str(cards), "ms": f"{ms:.1f}"}


@functools.cache
def compared() -> tuple[Compared, ...]:
    """Return all comparisons."""
    return tuple(compare(file, row) for file, row in rows())


def summary(some: Sequence[Compared]) -> dict[str, tuple[int, int, float, float]]:
    """Return for memory and time: the number of rows, the number within the limit, and the median and largest absolute error in percent."""
    memory = [abs(one.memory_error) for one in some if one.memory_error is not None]
    time = [abs(one.time_error) for one in some]
    return {
        name: (len(errors), sum(error <= limit for error in errors), statistics.median(errors), max(errors))
        for name, errors, limit in (("memory", memory, MEMORY_LIMIT), ("time", time, TIME_LIMIT))
        if errors
    }


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if a judged row exceeds a limit."""
    Parser(description=__doc__).parse_args(arguments)
    for one in compared():
        memory = "" if one.memory_error is None else f"{one.gib:7.2f} {one.measured_gib:7.2f} {one.memory_error:6.1f} %"
        what = f"{one.row['commit']} {one.row['preset']} {one.row['micro_batch']} {one.row['case']}"
        print(f"{one.kind:8} {one.ms:8.1f} {float(one.row['ms']):8.1f} {one.time_error:6.1f} %   {memory:24} {what}")
    judged = summary([one for one in compared() if one.kind == "judged"])
    for name, (count, within, median, worst) in judged.items():
        print(f"judged, {name}: {within} of {count} within the limit, median {median:.1f} %, largest {worst:.1f} %")
    return int(any(within < count for count, within, _, _ in judged.values()))


if __name__ == "__main__":
    sys.exit(main())
