"""What a training needs on a cluster, before any GPU is asked for: memory, bytes on the wire, and the time of a step, grid by grid.

    python -m megatron.lm.tools.plan --model llama3-8b --gpus 64 --gpu h100
    python -m megatron.lm.tools.plan --model 175b --gpus 32 --gpu h100 --precision O3 --sequence-length 4096 --top 3
    python -m megatron.lm.tools.plan --model 13b --gpus 16 --gpu h200 --tensor-model-parallel-size 2 --micro-batch-size 2 --json

Further flags are those of megatron.lm.pretrain, and override the model's. A flag of the grid, the micro-batch or recomputation fixes it;
the rest is searched, and the grids that fit are listed, the fastest first. Times are predicted from measured rates
(`megatron/lm/planning`); the page `docs/guide/planner.md` says how wrong they were where they could be compared.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import PRESETS, flops_per_token, published_vocabulary
from megatron.lm.config.rules.check import check
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, name

NETWORK_GB_S = 40.0
SEARCHED = {
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--num-layers-per-virtual-pipeline-stage": "num_layers_per_virtual_pipeline_stage",
    "--sequence-parallel": "sequence_parallel",
    "--no-sequence-parallel": "sequence_parallel",
    "--micro-batch-size": "micro_batch_size",
    "--recompute-granularity": "recompute_granularity",
}
# What a plan is not asked, so that every model takes the same line.
DEFAULTS = ("--use-distributed-optimizer", "--fp8-min-gain", "0", "--dry-run")


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is out of range: give a number above 0")
    return value


def parser() -> Parser:
    """The command line."""
    flags = Parser(description=__doc__, allow_abbrev=False)
    flags.add_argument("--model", required=True, choices=tuple(PRESETS), help="a model size, as --preset of the trainer")
    flags.add_argument("--gpus", required=True, type=count(1, 2**20), help="GPUs in all")
    flags.add_argument("--gpu", required=True, type=name, help="kind of GPU: h100 or h200")
    flags.add_argument(
        "--gpus-per-node", type=count(1, 1024), default=8, help="GPUs of one host, which NVLink connects (default: %(default)s)"
    )
    flags.add_argument("--gpu-memory-gib", type=positive, help="memory of a GPU (default: that of its data sheet)")
    flags.add_argument("--link-gb-s", type=positive, help="GB/s that a GPU sends to others of its host (default: as measured)")
    flags.add_argument(
        "--network-gb-s",
        type=positive,
        default=NETWORK_GB_S,
        help="GB/s that a GPU sends to other hosts (default: %(default)s, four fifths of a 400 Gb/s adapter; not measured)",
    )
    flags.add_argument("--precision", type=name, default="O3", help="as of the trainer, O0 is bf16 (default: %(default)s)")
    flags.add_argument("--sequence-length", type=count(1), help="tokens of a sequence (default: the model's)")
    flags.add_argument("--global-batch-size", type=count(1), help="sequences of a step (default: the model's number of tokens)")
    flags.add_argument("--top", type=count(1, 1000), default=5, help="grids to list (default: %(default)s)")
    flags.add_argument("--json", action="store_true", help="print one JSON object")
    return flags


def configuration(options: argparse.Namespace, rest: Sequence[str]) -> Config:
    """The run, its grid and micro-batch as the flags or the model say; SystemExit for a flag that the trainer does not know."""
    from msamp.numerics import recipe  # torch, for seconds: a wrong flag is told before

    own = PRESETS[options.model]
    sequence = options.sequence_length or own["seq_length"]
    batch = options.global_batch_size or max(1, own["global_batch_size"] * own["seq_length"] // sequence)
    words = ["--preset", options.model, *DEFAULTS, "--precision", recipe.by_name(options.precision).name]
    words += ["--seq-length", str(sequence), "--global-batch-size", str(batch), "--vocab-size", str(published_vocabulary(options.model))]
    return parse_args([*words, *rest])


def described(one: Any, cluster: Any, rates: Any, model: str) -> dict[str, Any]:
    """A planned grid as JSON can hold it: bytes, seconds, FLOPs of a process and of the whole step."""
    from megatron.lm.planning import wire
    from megatron.lm.planning.memory import vocabulary

    config, fullest = one.config, one.fullest
    parallel, training = config.parallel, config.training
    tokens = config.global_batch_size(cluster.gpus) * config.model.seq_length
    flops = flops_per_token(config.model, vocabulary(config)) * tokens
    seconds = one.step.total
    memory = {"weight": fullest.weight, **fullest.states, "gradient": fullest.gradient, "accumulated": fullest.accumulated}
    return {
        "tensor": parallel.tensor_model_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "data": config.data_parallel_size(cluster.gpus),
        "layers_a_virtual_stage": parallel.num_layers_per_virtual_pipeline_stage,
        "sequence_parallel": parallel.sequence_parallel,
        "micro_batch": training.micro_batch_size,
        "micro_batches": config.num_micro_batches(cluster.gpus),
        "recompute": " ".join([training.recompute_granularity or "none", *training.recompute_modules]),
        "captured": one.step.captured,
        "step_seconds": seconds,
        "seconds": one.step.seconds,
        "tokens_s_gpu": tokens / seconds / cluster.gpus,
        "flops": flops,
        "mfu": [flops / seconds / cluster.gpus / (peak * 1e12) for peak in rates.gpu.peaks],
        "memory_bytes": fullest.total,
        "memory": memory | {"activations": fullest.activations},
        "stage": fullest.stage,
        "wire_bytes": sum(wire.by_kind(config, cluster.gpus).values()),
        "wire": {kind: size for kind, size in wire.by_kind(config, cluster.gpus).items() if size},
        "flags": shlex.join(flags_of(config, model)),
    }


def flags_of(config: Config, model: str) -> list[str]:
    """The trainer's flags of a planned grid; they say all that was searched, whatever the model's preset says."""
    parallel, training = config.parallel, config.training
    words = ["--preset", model, "--precision", config.precision.name, "--use-distributed-optimizer"]
    words += ["--seq-length", str(config.model.seq_length), "--global-batch-size", str(training.global_batch_size)]
    words += ["--micro-batch-size", str(training.micro_batch_size)]
    words += ["--tensor-model-parallel-size", str(parallel.tensor_model_parallel_size)]
    words += ["--pipeline-model-parallel-size", str(parallel.pipeline_model_parallel_size)]
    if parallel.num_layers_per_virtual_pipeline_stage:
        words += ["--num-layers-per-virtual-pipeline-stage", str(parallel.num_layers_per_virtual_pipeline_stage)]
    if parallel.sequence_parallel or PRESETS[model]["sequence_parallel"]:
        words.append("--sequence-parallel" if parallel.sequence_parallel else "--no-sequence-parallel")
    if training.recompute_granularity:
        words += ["--recompute-granularity", training.recompute_granularity]
    if training.recompute_modules:
        words += ["--recompute-modules", *training.recompute_modules]
    if training.recompute_method:
        words += ["--recompute-method", training.recompute_method, "--recompute-num-layers", str(training.recompute_num_layers)]
    return words


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """One line a grid."""
    left, right = f"{'TP x PP x DP':<16}{'micro-batch':>12}{'chunk':>7}  {'recomputed':<24}", f"{'ms a step':>12}{'tokens/s/GPU':>14}"
    lines = [f"{left}{'GiB':>7}{right}{'MFU %':>8}"]
    for one in found:
        grid = f"{one['tensor']} x {one['pipeline']} x {one['data']}"
        batch, chunk = f"{one['micro_batches']} x {one['micro_batch']}", one["layers_a_virtual_stage"] or "-"
        lines.append(
            f"{grid:<16}{batch:>12}{chunk:>7}  {one['recompute']:<24}{one['memory_bytes'] / 2**30:>7.1f}{1e3 * one['step_seconds']:>12.1f}"
            f"{one['tokens_s_gpu']:>14,.0f}{100 * one['mfu'][0]:>8.1f}"
        )
    return lines


def details(one: dict[str, Any]) -> list[str]:
    """The first grid by kind."""

    def parts(sizes: dict[str, float], unit: float, digits: int) -> str:
        return ", ".join(f"{kind} {size / unit:.{digits}f}" for kind, size in sorted(sizes.items(), key=lambda item: -item[1]) if size)

    return [
        f"fullest process (stage {one['stage']}), GiB: {parts(one['memory'], 2**30, 2)}",
        f"sent by a process in a step, GB: {parts(one['wire'], 1e9, 2) or 'nothing'}",
        f"a step, ms: {parts(one['seconds'], 1e-3, 1)}{'' if one['captured'] else '; eager, no CUDA graph'}",
        f"FLOPs of a step: {one['flops']:.3e}",
    ]


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; its exit codes are those of `megatron.lm.shell.exit_codes`."""
    options, rest = parser().parse_known_args(argv)
    config = configuration(options, rest)
    fixed = [field for flag, field in SEARCHED.items() if any(word.partition("=")[0] == flag for word in rest)]
    from megatron.lm.planning.cluster import Cluster
    from megatron.lm.planning.fits import device_memory
    from megatron.lm.planning.memory import GIB
    from megatron.lm.planning.rates import rates_of
    from megatron.lm.planning.search import best

    rates = rates_of(options.gpu.lower())
    link = rates("link") if options.link_gb_s is None else options.link_gb_s * 1e9
    cluster = Cluster(
        gpus=options.gpus, per_host=options.gpus_per_node, link=link, network=options.network_gb_s * 1e9, latency=rates("latency")
    )
    memory = device_memory(options.gpu_memory_gib, options.gpu.lower())
    grids = best(config, cluster, rates, memory, fixed, options.top)
    check(grids[0].config, options.gpus)
    found = [described(one, cluster, rates, options.model) for one in grids]
    head = {
        "model": options.model,
        "gpu": rates.gpu.name,
        "gpus": options.gpus,
        "memory_gib": memory / GIB,
        "precision": config.precision.name,
        "sequence_length": config.model.seq_length,
        "global_batch_size": config.global_batch_size(options.gpus),
        "rates": rates.note,
    }
    if options.json:
        print(json.dumps(head | {"grids": found}, indent=1))
        return 0
    tokens = head["global_batch_size"] * config.model.seq_length
    print(
        f"{options.model}, {config.precision.name}, {options.gpus} x {rates.gpu.name} of {memory / GIB:.0f} GiB, {tokens:,} tokens a step"
    )
    print("\n".join(table(found)))
    print("\nthe first of them")
    print("\n".join(details(found[0])))
    print(f"flags: {found[0]['flags']}")
    print(f"rates: {rates.note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
