"""Measure time, memory, communication volume and exposed communication of GPT training steps on grids of tensor, pipeline and data
parallelism.

    torchrun --nproc-per-node 2 tools/bench/bench_grid.py --micro-batch-size 8          GPT-1.3B over TP 2 + SP, at O0 and O3
    torchrun --nproc-per-node 4 tools/bench/bench_grid.py --preset 7b --micro-batch-size 2 --no-profile --steps 5 \\
        --cases "O0 --pipeline-model-parallel-size 2 --use-distributed-optimizer" "O3 --pipeline-model-parallel-size 2"
    ... --peer 'torchrun --standalone --nproc-per-node 2 bench_megatron.py --cases bf16 --tp 2 --mbs 8'

A case is a level and further flags of megatron.lm.pretrain. Its flags determine the grid: without any it
is TP 1, PP 1 without sequence parallelism, whatever the preset, and the remaining processes are DP. A step has --micro-batches per process,
all with the same random tokens. There is no host synchronization between steps. Each case has its own process groups, and one model is in
memory at a time; measurements are appended to --csv immediately, so that a case that runs out of memory loses only itself and those after
it. Baselines (--peer): as in bench_data_parallel.py.

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
import functools
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron.lm.build import build_training
from megatron.lm.config import Config
from megatron.lm.config.presets import parameter_count
from megatron.lm.config.rules.check import check
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.graphs import replay, step_graph
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import count
from megatron.lm.step import train_step
from tools.bench import bench_step, rows
from tools.bench.bench_data_parallel import exposed_communication, link, memory, parser, peer_rows, step_times

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
ACTIVATIONS = (*dict.fromkeys(ROLES.values()), "head", "other_activation")
COLUMNS = (
    "case",
    "level",
    "preset",
    "tp",
    "pp",
    "vpp",
    "dp",
    "sp",
    "tp_wire",
    "micro_batch",
    "micro_batches",
    "gpus",
    "p2p",
    "params_m",
    "ms_p20",
    "ms",
    "ms_p80",
    "tokens_s_gpu",
    "peak_gib_min",
    "peak_gib_max",
    "rest_gib_min",
    "rest_gib_max",
    "weight_mib",
    "activation_mib",
    "input_gather_mib",
    "input_gather_again_mib",
    "grad_input_mib",
    "output_mib",
    "grad_output_mib",
    "head_mib",
    "pipeline_mib",
    "other_activation_mib",
    "table7_mib",
    "exposed_ms",
    "exposed_share",
    "loss",
)
CASES = tuple(f"{case} --tensor-model-parallel-size 2 --sequence-parallel" for case in ("O0", "O3", "O3 --tp-wire fp8"))
PEER_NAMES = {"mbs": "micro_batch", "nmb": "micro_batches"}


def configuration(case: str, options: argparse.Namespace, ranks: int) -> Config:
    """Return the preset as the trainer would run a case on `ranks` processes; flags of the case override --flags.

    Raises:
        ValueError: a grid that does not fit the ranks or the model; the message names a fix.
    """
    level, _, flags = case.partition(" ")
    config = bench_step.configuration(level, argparse.Namespace(**vars(options) | {"flags": f"{options.flags} {flags}"}))
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
    return max(3, window + 1 + (replay.WARM_UP + 1 if step_graph.obstacle(config) is None else 0))


def grid(config: Config, ranks: int) -> dict[str, Any]:
    """Return the columns that describe the grid and the batch."""
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    return {
        "tp": tp,
        "pp": parallel.pipeline_model_parallel_size,
        "vpp": config.virtual_stages or 1,
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


def measure(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one row on this rank; collective; needs `process_groups.initialize`."""
    device, ranks = process_groups.device(), dist.get_world_size()
    training = build_training(config, options.vocab_size)
    batches = bench_step.random_batches(config, options.vocab_size, device)
    step = functools.partial(train_step, training, batches, step_graph.build(training))
    for number in range(warm_up(config) if options.warm_up is None else options.warm_up):
        if number == 1 and device.type == "cuda":  # a replayed graph allocates nothing: its peak is that of the step that captured it
            torch.cuda.reset_peak_memory_stats()
        step()
    training.grad_sync.sent.take()
    times, result = step_times(step, options.steps)
    row: dict[str, Any] = memory() | traffic(training.grad_sync.sent.take(), options.steps)
    loss = torch.stack([result.loss_sum, result.tokens]).double()
    dist.all_reduce(loss)  # only the last pipeline stage has it; tensor-parallel ranks have the same
    low, median, high = rows.percentiles(times)
    row |= {
        "params_m": round(parameter_count(config.model, config.padded_vocab_size(options.vocab_size)) / 1e6, 1),
        "ms_p20": round(low * 1e3, 1),
        "ms": round(median * 1e3, 1),
        "ms_p80": round(high * 1e3, 1),
        "tokens_s_gpu": round(config.global_batch_size(ranks) * config.model.seq_length / median / ranks),
        "loss": round(float(loss[0] / loss[1]), 4),
    }
    return row if options.no_profile else row | exposed_communication(step)


def grid_of_peer(row: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the sizes of a baseline's grid, which has no stages: DP over the processes that TP leaves."""
    return {"pp": 1, "vpp": 1, "dp": ranks // int(row.get("tp", 1))}


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure on every rank; rank 0 prints and appends the results, and runs the baselines after the others have left."""
    flags = parser(__doc__, CASES, "grid.csv")
    flags.add_argument("--micro-batches", type=count(1), help="per process and step; derived: 1, or 4 x the stages of a pipeline")
    flags.add_argument(
        "--warm-up", type=count(0), help="steps that are not measured; derived: 17 with delayed scaling, else 3, and 4 for CUDA graphs"
    )
    flags.add_argument(
        "--no-profile", action="store_true", help="do not measure the exposed share, which takes 3 steps and a trace per case"
    )
    options = flags.parse_args(argv)
    launch = process_groups.launch_from_environment()
    ranks = launch.world_size
    configs = {case: configuration(case, options, ranks) for case in options.cases}
    where = rows.machine(options.commit) if launch.rank == 0 else {}
    common = {"preset": options.preset, "gpus": ranks, "p2p": link()}

    def report(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        rows.append(options.csv, [where | {column: row.get(column, "") for column in COLUMNS}])

    for case, config in configs.items():
        process_groups.initialize(config)
        name = f"{case} {options.flags}".strip()
        row = common | {"case": name, "level": case.split()[0]} | grid(config, ranks) | measure(config, options)
        if launch.rank == 0:
            report(row)
        process_groups.leave_grid()  # the next case has another grid, with its own buffers in megatron-core
        gc.collect()
        torch.cuda.empty_cache()
    process_groups.shutdown()
    if launch.rank > 0:
        return 0
    for row in peer_rows(options.peer, ranks):
        report(common | grid_of_peer(row, ranks) | row | {column: row[name] for name, column in PEER_NAMES.items() if name in row})
    return 0


if __name__ == "__main__":
    sys.exit(main())
