"""Predict what a training run needs on a cluster, without a GPU: memory, communication volume and time per step, grid by grid.

    msamp plan --model llama3-8b --gpus 64 --gpu h100
    msamp plan --model 175b --gpus 32 --gpu h100 --precision O3 --sequence-length 4096 --top 3
    msamp plan --model 13b --gpus 16 --gpu h200 --tensor-model-parallel-size 2 --micro-batch-size 2 --json

Further flags are passed to msamp pretrain, and override the model's. A flag for the grid, the micro-batch or recomputation fixes it;
the rest is searched, and the grids that fit are listed, the fastest first. Times are predicted from measured rates
(`megatron/lm/planning`); `docs/guide/planner.md` compares predictions with measurements.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from megatron.lm.config import Config, ParallelConfig, TrainingConfig, flag
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import PRESETS, flops_per_token, published_vocabulary
from megatron.lm.config.rules.check import check
from megatron.lm.config.sections.precision import MEASURED
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, name

NETWORK_GB_S = 40.0
SEARCHED = (
    *("micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "cp_comm_type"),
    *("expert_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "sequence_parallel", "cuda_graph", "recompute_granularity"),
)
ALWAYS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size")  # flags that a plan prints whatever they are
# Flags that a plan always sets, so that the same command line works for every model.
DEFAULTS = ("--use-distributed-optimizer", "--fp8-min-gain", "0", "--dry-run")


def parser() -> Parser:
    """Return the parser of the command line."""
    flags = Parser(description=__doc__, allow_abbrev=False)
    flags.add_argument("--model", required=True, choices=tuple(PRESETS), help="model size, as in the trainer's --preset")
    flags.add_argument("--gpus", required=True, type=count(1, 2**20), help="total number of GPUs")
    flags.add_argument("--gpu", required=True, type=name, help="kind of GPU: h100 or h200")
    flags.add_argument(
        "--gpus-per-node", type=count(1, 1024), default=8, help="GPUs of one host, which NVLink connects (default: %(default)s)"
    )
    flags.add_argument("--gpu-memory-gib", type=float, help="memory of a GPU (default: from its data sheet)")
    flags.add_argument("--link-gb-s", type=float, help="GB/s that a GPU sends to others on its host (default: as measured)")
    flags.add_argument(
        "--network-gb-s",
        type=float,
        default=NETWORK_GB_S,
        help="GB/s that a GPU sends to other hosts (default: %(default)s, four fifths of a 400 Gb/s adapter; not measured)",
    )
    flags.add_argument("--precision", type=name, default="O3", help="as in the trainer, O0 is bf16 (default: %(default)s)")
    flags.add_argument("--sequence-length", type=count(1), help="tokens per sequence (default: the model's)")
    flags.add_argument("--global-batch-size", type=count(1), help="sequences per step (default: the model's tokens per step)")
    flags.add_argument("--top", type=count(1, 1000), default=5, help="grids to list (default: %(default)s)")
    flags.add_argument("--json", action="store_true", help="print one JSON object")
    return flags


def configuration(options: argparse.Namespace, rest: Sequence[str]) -> Config:
    """Return the run with grid and micro-batch of the flags or the model; SystemExit for a flag that the trainer does not know.

    Raises:
        ValueError: the precision of attention is left to a measurement.
    """
    from msamp.numerics import recipe  # imports torch, which takes seconds: invalid flags are reported before

    own = PRESETS[options.model]
    sequence = options.sequence_length or own["seq_length"]
    batch = options.global_batch_size or max(1, own["global_batch_size"] * own["seq_length"] // sequence)
    words = ["--preset", options.model, *DEFAULTS, "--precision", recipe.by_name(options.precision).name]
    words += ["--seq-length", str(sequence), "--global-batch-size", str(batch), "--vocab-size", str(published_vocabulary(options.model))]
    config = parse_args([*words, *rest])
    if config.precision.attention_precision == MEASURED:
        raise ValueError("--attention-precision auto is decided by a measurement when a run starts: give fp8 or bf16 to a plan")
    return config


def described(grid: Any, cluster: Any, rates: Any, model: str) -> dict[str, Any]:
    """Return a planned grid as JSON-serializable data: bytes, seconds and FLOPs per process and of the whole step."""
    from megatron.lm.planning import wire
    from megatron.lm.planning.layers import vocabulary

    config, fullest = grid.config, grid.fullest
    parallel, training = config.parallel, config.training
    tokens = config.global_batch_size(cluster.gpus) * config.model.seq_length
    flops = flops_per_token(config.model, vocabulary(config)) * tokens
    seconds = grid.step.total
    memory = {"weight": fullest.weight, **fullest.states, "gradient": fullest.gradient, "accumulated": fullest.accumulated}
    return {
        "tensor": parallel.tensor_model_parallel_size,
        "context": parallel.context_parallel_size,
        "context_comm": parallel.cp_comm_type if parallel.context_parallel_size > 1 else None,
        "expert": parallel.expert_model_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "data": config.data_parallel_size(cluster.gpus),
        "layers_a_virtual_stage": parallel.num_layers_per_virtual_pipeline_stage,
        "sequence_parallel": parallel.sequence_parallel,
        "micro_batch": training.micro_batch_size,
        "micro_batches": config.num_micro_batches(cluster.gpus),
        "recompute": " ".join([training.recompute_granularity or "none", *training.recompute_modules]),
        "captured": grid.step.captured,
        "step_seconds": seconds,
        "seconds": grid.step.seconds,
        "tokens_s_gpu": tokens / seconds / cluster.gpus,
        "flops": flops,
        "mfu": [flops / seconds / cluster.gpus / (peak * 1e12) for peak in rates.gpu.peaks],
        "memory_bytes": fullest.total,
        "memory": memory | {"activations": fullest.activations},
        "stage": fullest.stage,
        "wire_bytes": sum(wire.by_kind(config, cluster.gpus).values()),
        "wire": {kind: size for kind, size in wire.by_kind(config, cluster.gpus).items() if size},
        "flags": shlex.join(flags_of(model, config.precision.name, config.model.seq_length, config.parallel, config.training)),
    }


def flags_of(model: str, precision: str, seq_length: int, parallel: ParallelConfig, training: TrainingConfig) -> list[str]:
    """Return the trainer's flags of a planned grid, including everything that was searched, even if it equals the preset."""
    words = ["--preset", model, "--precision", precision, "--use-distributed-optimizer"]
    words += ["--seq-length", str(seq_length), "--global-batch-size", str(training.global_batch_size)]
    for setting in (*SEARCHED, "recompute_modules", "recompute_method", "recompute_num_layers"):
        section = parallel if hasattr(parallel, setting) else training
        value = getattr(section, setting)
        default = next(f.default for f in fields(section) if f.name == setting)
        if value == default == PRESETS[model].get(setting, default) and setting not in ALWAYS:
            continue
        if isinstance(value, bool):
            words.append(flag(setting if value else f"no_{setting}"))
        elif value not in (None, ()):
            words += [flag(setting), *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def table(grids: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line per grid."""
    left, right = f"{'TP x PP x DP':<20}{'micro-batch':>12}{'chunk':>7}  {'recomputed':<24}", f"{'ms/step':>12}{'tokens/s/GPU':>14}"
    lines = [f"{left}{'GiB':>7}{right}{'MFU, BF16':>11}{'MFU, FP8':>10}"]
    for planned in grids:
        grid = f"{planned['tensor']} x {planned['pipeline']} x {planned['data']}"
        grid += f", CP {planned['context']} {planned['context_comm']}" if planned["context"] > 1 else ""
        grid += f", EP {planned['expert']}" if planned["expert"] > 1 else ""
        batch, chunk = f"{planned['micro_batches']} x {planned['micro_batch']}", planned["layers_a_virtual_stage"] or "-"
        lines.append(
            f"{grid:<20}{batch:>12}{chunk:>7}  "
            f"{planned['recompute']:<24}{planned['memory_bytes'] / 2**30:>7.1f}{1e3 * planned['step_seconds']:>12.1f}"
            f"{planned['tokens_s_gpu']:>14,.0f}{planned['mfu'][0]:>11.1%}{planned['mfu'][1]:>10.1%}"
        )
    return lines


def details(grid: dict[str, Any]) -> list[str]:
    """Return memory, communication, time and FLOPs of a grid by kind."""

    def parts(sizes: dict[str, float], unit: float, digits: int) -> str:
        return ", ".join(f"{kind} {size / unit:.{digits}f}" for kind, size in sorted(sizes.items(), key=lambda item: -item[1]) if size)

    return [
        f"fullest process (stage {grid['stage']}), GiB: {parts(grid['memory'], 2**30, 2)}",
        f"sent per process and step, GB: {parts(grid['wire'], 1e9, 2) or 'nothing'}",
        f"time per step, ms: {parts(grid['seconds'], 1e-3, 1)}{'' if grid['captured'] else '; eager, no CUDA graph'}",
        f"FLOPs per step: {grid['flops']:.3e}",
    ]


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    options, rest = parser().parse_known_args(argv)
    config = configuration(options, rest)
    given = {word.partition("=")[0] for word in rest}
    fixed = [setting for setting in SEARCHED if given & {flag(setting), flag(f"no_{setting}")}]
    from megatron.lm.planning.fits import device_memory
    from megatron.lm.planning.memory import GIB
    from megatron.lm.planning.rates import Cluster, rates_of
    from megatron.lm.planning.search import best

    for setting in ("gpu_memory_gib", "link_gb_s", "network_gb_s"):
        if (value := getattr(options, setting)) is not None and not 0 < value < 1e9:
            raise ValueError(f"{flag(setting)} {value} is out of range: give a number above 0")
    rates = rates_of(options.gpu.lower())
    link = rates("link") if options.link_gb_s is None else options.link_gb_s * 1e9
    cluster = Cluster(
        gpus=options.gpus, per_host=options.gpus_per_node, link=link, network=options.network_gb_s * 1e9, latency=rates("latency")
    )
    memory = device_memory(options.gpu_memory_gib, options.gpu.lower())
    grids = best(config, cluster, rates, memory, fixed, options.top)
    check(grids[0].config, options.gpus)
    plans = [described(grid, cluster, rates, options.model) for grid in grids]
    head = {
        "model": options.model,
        "gpu": rates.gpu.name,
        "gpus": options.gpus,
        "memory_gib": memory / GIB,
        "precision": config.precision.name,
        "sequence_length": config.model.seq_length,
        "global_batch_size": config.global_batch_size(options.gpus),
        "rates": rates.note,
        "commits": sorted({row.commit for row in rates.rows if row.commit}),
    }
    if options.json:
        print(json.dumps(head | {"grids": plans}, indent=1))
        return 0
    tokens = head["global_batch_size"] * config.model.seq_length
    print(
        f"{options.model}, {config.precision.name}, {options.gpus} x {rates.gpu.name} of {memory / GIB:.0f} GiB, "
        f"{tokens:,} tokens per step, by the rates of an {rates.rows[0].gpu.removeprefix('NVIDIA ')}"
    )
    print("\n".join(table(plans)))
    print("MFU: share of the peaks, dense {:,.0f} TFLOP/s in BF16 and {:,.0f} in FP8".format(*rates.gpu.peaks))
    print("\nthe first grid")
    print("\n".join(details(plans[0])))
    print(f"flags: {plans[0]['flags']}")
    print(f"rates: {rates.note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
