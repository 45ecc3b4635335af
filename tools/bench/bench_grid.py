"""Measure time, memory, communication volume and exposed communication of GPT training steps on grids of tensor, pipeline and data
parallelism.

    torchrun --nproc-per-node 2 tools/bench/bench_grid.py --micro-batch-size 8          GPT-1.3B over TP 2 + SP, at O0 and O3
    torchrun --nproc-per-node 2 tools/bench/bench_grid.py --cases O3 "O2 --grad-exchange nccl"                       over DP 2
    torchrun --nproc-per-node 4 tools/bench/bench_grid.py --preset 7b --micro-batch-size 2 --no-profile --steps 5 \\
        --cases "O0 --pipeline-model-parallel-size 2 --use-distributed-optimizer" "O3 --pipeline-model-parallel-size 2"
    ... --peer 'torchrun --standalone --nproc-per-node 2 baseline.py --tp 2'

A case is a level and further flags of msamp pretrain. Its flags determine the grid: without any it
is TP 1, PP 1 without sequence parallelism, whatever the preset, and the remaining processes are DP. A step has --micro-batches per process,
all with the same random tokens. There is no host synchronization between steps. Measurements are appended to --csv immediately. Baselines
(--peer), as in bench_step.py, run after our processes have left the GPUs.

Columns: `ms` and `exposed_*` of rank 0 (on a pipeline NCCL's kernels also wait for other stages, so the bubble counts as exposed); `_min`,
`_max` over the ranks. MiB are what a rank sends in a step, mean over the ranks: `weight_mib` gradients and weights, `activation_mib` all
of the following except `table7_mib`. Of the transformer layers: `input_gather_mib` in forward and `input_gather_again_mib` of the saved
input in backward (column-parallel layers), `grad_input_mib` the sum of its gradient, `output_mib` the sum of row-parallel layers' outputs,
`grad_output_mib` the gather of its gradient. `head_mib` all of the LM head's, `pipeline_mib` between stages, `other_activation_mib` the
embedding's sum and the gather of its gradient, and the amaxes of casts just in time. Not counted: what the loss
sends, a few numbers per token. `table7_mib` has the scope of FP8-LM Table 7: all-gathers of the layers' inputs and reduce-scatters of their
gradients.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from megatron.lm.config import Config
from megatron.lm.config.presets import parameter_count
from megatron.lm.config.rules.check import check
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.graphs import replay, step_graph
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import count
from msamp.comm.copies import links_disabled
from tools.bench import training_steps
from tools.bench.training_steps import MEMORY, TIMES, VOCABULARY, Row, Step

ROLES = {
    "input all-gather": "input_gather",
    "input all-gather again": "input_gather_again",
    "grad_input all-reduce": "grad_input",
    "grad_input reduce-scatter": "grad_input",
    "output all-reduce": "output",
    "output reduce-scatter": "output",
    "grad_output all-gather": "grad_output",
    "pipeline send": "pipeline",
}
TABLE7 = ("input_gather", "input_gather_again", "grad_input")
ACTIVATIONS = (*TABLE7, "output", "grad_output", "head", "pipeline", "other_activation")
COLUMNS = (
    *("case", "level", "preset", "tp", "pp", "vpp", "dp", "sp", "tp_wire", "micro_batch", "micro_batches", "gpus", "p2p", "params_m"),
    *(*TIMES, *MEMORY, "weight_mib", "activation_mib", *(f"{name}_mib" for name in ACTIVATIONS), "table7_mib"),
    *("exposed_ms", "exposed_share", "loss"),
)
CASES = tuple(f"{case} --tensor-model-parallel-size 2 --sequence-parallel" for case in ("O0", "O3", "O3 --tp-wire fp8"))
PEER_NAMES = {"mbs": "micro_batch", "nmb": "micro_batches"}
PROFILED_STEPS = 2
Interval = tuple[float, float]  # start and end


def configuration(case: str, options: argparse.Namespace, ranks: int) -> Config:
    """Return the preset as the trainer would run a case on `ranks` processes; flags of the case override --flags.

    Raises:
        ValueError: a grid that does not fit the ranks or the model; the message names a fix.
    """
    level, _, flags = case.partition(" ")
    config = training_steps.configuration(level, argparse.Namespace(**vars(options) | {"flags": f"{options.flags} {flags}"}))
    pp = config.parallel.pipeline_model_parallel_size
    micro_batches = options.micro_batches or (4 * pp if pp > 1 else 1)
    batch = config.training.micro_batch_size * max(1, config.data_parallel_size(ranks)) * micro_batches
    config = replace(config, training=replace(config.training, global_batch_size=batch))
    check(replace(config, logging=replace(config.logging, dry_run=True)), ranks)  # a dry run requires no data
    return config


def warm_up(config: Config) -> int:
    """Return the number of warm-up steps: delayed scaling is just in time until its window of 16 is full, and graphs are captured after
    some more eager steps."""
    gemm = build_recipe(config.precision).gemm
    window = 0 if gemm is None else gemm.input.scaling.window
    obstacle = step_graph.obstacle(config.model, config.parallel, config.precision, config.training)
    return max(3, window + 1 + (replay.WARM_UP + 1 if obstacle is None else 0))


def grid(config: Config, ranks: int) -> dict[str, Any]:
    """Return the columns that describe the grid and the batch."""
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    return {
        "tp": tp,
        "pp": parallel.pipeline_model_parallel_size,
        "vpp": config.parallel.virtual_stages(config.model.num_layers) or 1,
        "dp": config.data_parallel_size(ranks),
        "sp": "on" if parallel.sequence_parallel else "off",
        "tp_wire": parallel.tp_wire if tp > 1 else "",
        "micro_batch": config.training.micro_batch_size,
        "micro_batches": config.num_micro_batches(ranks),
    }


def role(collective: str) -> str:
    """Return the entry of `ACTIVATIONS` under which a collective of the counters is recorded."""
    return "head" if collective.startswith("LM head ") else ROLES.get(collective, "other_activation")


def traffic(sent: Mapping[tuple[str, str], int], steps: int) -> dict[str, float]:
    """Return the columns in MiB, from the bytes that this rank sent in `steps` steps by (kind, collective); collective."""
    sizes = dict.fromkeys(("weight", *ACTIVATIONS), 0)
    for (kind, collective), size in sent.items():
        sizes["weight" if kind == "weight" else role(collective)] += size
    total = torch.tensor(list(sizes.values()), dtype=torch.float64, device=process_groups.device())
    dist.all_reduce(total)
    mean = dict(zip(sizes, (total / (dist.get_world_size() * steps * 2**20)).tolist(), strict=True))
    mean |= {"activation": sum(mean[name] for name in ACTIVATIONS), "table7": sum(mean[name] for name in TABLE7)}
    return {f"{name}_mib": round(size, 3) for name, size in mean.items()}


def covered(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of intervals (start, end), in any order."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def exposed(communication: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """Return the length covered by communication but not by compute; intervals in any order, overlapping or not."""
    return covered([*communication, *compute]) - covered(compute)


def device_intervals(trace: Mapping[str, Any]) -> tuple[list[Interval], list[Interval]]:
    """Return the GPU activity in a Chrome trace of torch.profiler: NCCL's kernels, and everything else including copies, each sorted, in
    ms.

    Selects by category, because a trace also repeats the host's annotations on the GPU's tracks, under names such as nccl:all_to_all.
    """
    communication: list[Interval] = []
    compute: list[Interval] = []
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            interval = (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
            (communication if "nccl" in event["name"].lower() else compute).append(interval)
    return sorted(communication), sorted(compute)


def exposed_communication(step: Step) -> dict[str, float]:
    """Measure the time of this rank's step in which an NCCL kernel runs but no other kernel or copy; collective.

    This is an upper bound of the cost of communication: NCCL's kernels also spin while they wait for a slower rank, and an idle GPU may be
    waiting for its host.

    Returns:
        exposed_ms and profiled_ms (the whole step) per step under the profiler, and their ratio exposed_share; empty without CUDA, or if
        the profiler recorded no NCCL kernel.
    """
    device = process_groups.device()
    if device.type != "cuda":
        return {}
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], schedule=schedule) as profiler:
        step()
        torch.cuda.synchronize()
        profiler.step()
        dist.all_reduce(torch.zeros(1, device=device))  # the ranks start together, even if their profilers took different times
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
        ms = (time.perf_counter() - start) * 1e3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        communication, compute = device_intervals(json.loads(path.read_text(encoding="utf-8")))
    if not communication:
        return {}
    alone = exposed(communication[1:], compute)  # the first is the all-reduce above
    return {
        "profiled_ms": round(ms / PROFILED_STEPS, 1),
        "exposed_ms": round(alone / PROFILED_STEPS, 2),
        "exposed_share": round(alone / ms, 4),
    }


def measure(case: str, config: Config, options: argparse.Namespace) -> Row:
    """Measure one row on this rank; collective; needs `process_groups.initialize`."""
    ranks = dist.get_world_size()
    training, step = training_steps.prepare(config, options, warm_up(config) if options.warm_up is None else options.warm_up)
    times, result = training_steps.step_times(step, options.steps)
    row = {"case": f"{case} {options.flags}".strip()} | grid(config, ranks) | training_steps.memory_columns()
    row |= traffic(training.grad_sync.sent.take(), options.steps)
    loss = torch.stack([result.loss_sum, result.tokens]).double()
    dist.all_reduce(loss)  # only the last pipeline stage has it; tensor-parallel ranks have the same
    row |= training_steps.time_columns(times, config.global_batch_size(ranks) * config.model.seq_length / ranks)
    row["params_m"] = round(parameter_count(config.model, config.padded_vocab_size(options.vocab_size)) / 1e6, 1)
    row["loss"] = round(float(loss[0] / loss[1]), 4)
    return row if options.no_profile else row | exposed_communication(step)


def of_peer(row: Mapping[str, Any], ranks: int) -> Row:
    """Return a baseline's row with the sizes of its grid, which has no stages: DP over the processes that TP leaves."""
    batch = {column: row[name] for name, column in PEER_NAMES.items() if name in row}
    return {"pp": 1, "vpp": 1, "dp": ranks // int(row.get("tp", 1))} | dict(row) | batch


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure on every rank; rank 0 prints and appends the results, and runs the baselines after the others have left."""
    flags = training_steps.parser(__doc__, "grid.csv")
    flags.add_argument("--cases", nargs="*", default=CASES, metavar="CASE", help='a level and flags, such as "O3 --tp-wire fp8"')
    flags.add_argument("--micro-batches", type=count(1), help="per process and step; derived: 1, or 4 x the stages of a pipeline")
    flags.add_argument(
        "--warm-up", type=count(0), help="steps that are not measured; derived: 17 with delayed scaling, else 3, and 4 for CUDA graphs"
    )
    flags.add_argument(
        "--no-profile", action="store_true", help="do not measure the exposed share, which takes 3 steps and a trace per case"
    )
    options = flags.parse_args(argv)
    ranks = process_groups.launch_from_environment().world_size
    vocabulary = f" --vocab-size {options.vocab_size}" if options.vocab_size != VOCABULARY else ""
    common = {"preset": options.preset + vocabulary, "gpus": ranks, "p2p": "off" if links_disabled() else "on"}
    cases = [(case, configuration(case, options, ranks)) for case in options.cases]
    return training_steps.run(
        cases, lambda case, config: measure(case, config, options), COLUMNS, options, common, lambda row: of_peer(row, ranks)
    )


if __name__ == "__main__":
    sys.exit(main())
