"""Measure time, memory, communication volume and exposed communication of GPT training steps, data-parallel over the GPUs of one host.

    torchrun --nproc-per-node 2 tools/bench/bench_data_parallel.py              GPT-1.3B at O0 with ZeRO, O1, O2 and O3
    torchrun --nproc-per-node 2 tools/bench/bench_data_parallel.py --cases O3 "O2 --use-distributed-optimizer" "O3 --grad-exchange nccl"
    NCCL_P2P_DISABLE=1 torchrun ...                                             without the link between GPUs, like a slow network
    ... --peer 'torchrun --standalone --nproc-per-node 2 bench_megatron.py --cases bf16 --overlap'

A case is a level and further flags of msamp pretrain. There is no host synchronization between steps, so that weights are gathered
while the next forward runs. Baselines (--peer), as in bench_step.py, run after our processes have left the GPUs. Measurements are appended
to --csv.

Columns: `ms` of rank 0; `_min`, `_max` over the ranks; `wire_mib`: weights and gradients that a rank sends per step, mean over the ranks;
`wire_bytes_param`: the same per parameter x N / (N - 1), which does not depend on the number N of ranks; `wire_linear_bytes_param`: the
same for the payloads of linear weights only; `exposed_*` and `no_comm_ms` as `tools/bench/communication.py` defines them.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.lm.config import Config
from megatron.lm.processes import process_groups
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import count
from msamp.comm.grad_sync import GradSync
from msamp.numerics.tensor import ScalingTensor
from tools.bench import training_steps
from tools.bench.communication import exposed_communication, without_communication
from tools.bench.training_steps import MEMORY, TIMES, WARM_UP, Row

COLUMNS = (
    *("case", "level", "zero", "exchange", "preset", "micro_batch", "gpus", "p2p", "params_m", *TIMES, *MEMORY),
    *("wire_mib", "wire_bytes_param", "wire_linear_bytes_param"),
    *("profiled_ms", "exposed_ms", "exposed_share", "no_comm_ms", "communication_share", "loss"),
)
CASES = ("O0 --use-distributed-optimizer", "O1", "O2", "O3")


def configuration(case: str, options: argparse.Namespace, ranks: int) -> Config:
    """Return the preset as the trainer would run a case on `ranks` processes; flags of the case override --flags."""
    level, *flags = shlex.split(case)
    batch = ["--global-batch-size", str(options.micro_batch_size * ranks)]
    flags = [*batch, *shlex.split(options.flags), *flags]
    return training_steps.configuration(level, argparse.Namespace(**vars(options) | {"flags": shlex.join(flags)}))


def wire_bytes_per_parameter(sync: GradSync, params: Collection[Tensor]) -> float:
    """Return the payload bytes per parameter and step, mean over `params`: what all ranks send together, divided by their number less 1.

    A gradient is sent to its owner; then the new weight is sent back under ZeRO, otherwise the averaged gradient. Scales, a few floats per
    tensor, are not counted.
    """
    total = 0
    for bucket in sync.buckets:
        for p in bucket.params:
            if p in params:
                back = (p.payload if isinstance(p, ScalingTensor) else p).element_size() if sync.shard else bucket.format.bytes
                total += p.numel() * (bucket.format.bytes + back)
    return total / sum(p.numel() for p in params)


def linear_weights(sync: GradSync) -> set[Tensor]:
    """Return the weights of the transformer layers' linear layers, at any level."""
    return {p for p, name in sync.names.items() if ".linear_" in name and p.dim() == 2}


def measure(config: Config, options: argparse.Namespace) -> Row:
    """Measure one row on this rank; collective; needs `process_groups.initialize`."""
    training, step = training_steps.prepare(config, options, options.warm_up)
    sync, ranks = training.grad_sync, dist.get_world_size()
    times, result = training_steps.step_times(step, options.steps)
    loss = float(result.loss_sum / result.tokens)
    wire = torch.tensor(sync.sent.total("weight") / options.steps, dtype=torch.float64, device=process_groups.device())
    memory = training_steps.memory_columns()
    dist.all_reduce(wire)
    params = sum(p.numel() for p in training.model.parameters())
    row: Row = {
        "zero": "on" if sync.shard else "off",
        "exchange": sync.exchange.name,
        "params_m": round(params / 1e6, 1),
        **training_steps.time_columns(times, config.global_batch_size(ranks) * config.model.seq_length / ranks),
        **memory,
        "wire_mib": round(float(wire) / ranks / 2**20, 3),
        "loss": round(loss, 4),
    }
    if ranks > 1:
        row["wire_bytes_param"] = round(float(wire) / (ranks - 1) / params, 4)
        row["wire_linear_bytes_param"] = round(wire_bytes_per_parameter(sync, linear_weights(sync)), 4)
    row |= exposed_communication(step)
    return row | without_communication(training, step, options.steps, statistics.median(times) * 1e3)


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Measure on every rank; rank 0 prints and appends the results, and runs the baselines after the others have left."""
    flags = training_steps.parser(__doc__, "data_parallel.csv")
    flags.add_argument("--cases", nargs="*", default=CASES, metavar="CASE", help='a level and flags, such as "O3 --grad-exchange nccl"')
    flags.add_argument("--warm-up", type=count(0), default=WARM_UP, help="steps that are not measured")
    options = flags.parse_args(argv)
    ranks = process_groups.launch_from_environment().world_size
    common = {"preset": options.preset, "micro_batch": options.micro_batch_size, "gpus": ranks, "p2p": training_steps.link()}
    cases = [(case, configuration(case, options, ranks)) for case in options.cases]
    return training_steps.run(cases, lambda _, config: measure(config, options), COLUMNS, options, common)


if __name__ == "__main__":
    sys.exit(main())
