"""Refuse a run that does not fit in the memory of a GPU or host at its start, not after minutes of allocation; the text of `--dry-run`."""

import os
from collections.abc import Iterator
from dataclasses import replace

import psutil
import torch

from megatron.lm.config import Config
from megatron.lm.config.presets import active_parameter_count, parameter_count
from megatron.lm.config.rules.precision import attention_refusal
from megatron.lm.config.sections.precision import MEASURED, saved_activations
from megatron.lm.data.masked import model_vocabulary
from megatron.lm.data.tokenizers.tokenizer import build_tokenizer
from megatron.lm.model import fp8_layers
from megatron.lm.planning.layers import vocabulary
from megatron.lm.planning.memory import GIB, RESERVED, Rank, captured, document_mask, plan
from megatron.lm.planning.rates import GPUS
from msamp.nn.saved_activations import AS_IT_IS


def device_memory(gib: float | None, gpu: str | None = None) -> float:
    """Return the bytes available to a process, for dry run and planner: `gib` if given, else from the data sheet of `gpu`, a key of
    `rates.GPUS`, else of this machine's GPU, else of an H100."""
    if gib is None and gpu is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return (GPUS[gpu or "h100"].memory_gib if gib is None else gib) * GIB


def dry_run(config: Config, world_size: int, saved: fp8_layers.SavedPrecision) -> None:
    """Print the memory plan of `--dry-run` on rank 0.

    Args:
        saved: returns the precision settings of the checkpoint that the run would resume, or None.

    Raises:
        ValueError: if a process needs more memory than its device has.
    """
    capacity, config = device_memory(config.logging.device_memory_gib), with_vocabulary(config)
    check_weights(config, capacity)
    refused, settings = attention_refusal(config), (config.model, config.parallel, config.precision, config.training)
    precision, choice = fp8_layers.decide(*settings, None, saved, refused)
    config = replace(config, precision=precision)
    main = os.environ.get("RANK", "0") == "0"
    if main:
        print(report(config, world_size))
        print("\n".join(filter(None, (fp8_layers.describe(config.model, precision, choice), choice.attention))), flush=True)
    check_fits(config, world_size, capacity)
    if main:
        print(f"fits into {capacity / GIB:.1f} GiB; nothing was started", flush=True)


def check_machine(config: Config, world_size: int) -> None:
    """Raise a ValueError if the run does not fit into this machine, before minutes of allocation."""
    if config.precision.attention_precision == MEASURED and config.precision.named.fp8:  # undecided: FP8 needs less memory
        config = replace(config, precision=replace(config.precision, attention_precision="fp8"))
    host = psutil.virtual_memory().total
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    device = host / int(local) if local.isdecimal() and int(local) else host
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0).total_memory
    check_fits(config, world_size, device, reserved=0)


def with_vocabulary(config: Config) -> Config:
    """Return `config` with the size of its tokenizer as `vocab_size`, for planning; unchanged if it has no tokenizer.

    Raises:
        ValueError: if the tokenizer's files cannot be read.
    """
    if config.data.tokenizer_type in (None, "NullTokenizer"):
        return config
    size = model_vocabulary(config.model.objective, build_tokenizer(config.data, config.model.vocab_size))
    return replace(config, model=replace(config.model, vocab_size=size))


def check_fits(config: Config, world_size: int, device_memory: float, reserved: int = RESERVED) -> None:
    """Raise a ValueError if the fullest rank and `reserved` need more than `device_memory` bytes."""
    check_weights(config, device_memory)
    fullest = max(plan(config, world_size), key=lambda rank: rank.total)
    if fullest.total + reserved > device_memory:
        remedies = ", ".join(_remedies(config, fullest, config.parallel.axes(world_size).copies))
        beside = f" and {reserved / GIB:g} for CUDA and NCCL" if reserved else ""
        raise ValueError(
            f"pipeline stage {fullest.stage} needs {fullest.total / GIB:.1f} GiB per process{beside}, but the device has "
            f"{device_memory / GIB:.1f}{' (--device-memory-gib)' if reserved else ''}: {remedies}"
        )


def check_weights(config: Config, device_memory: float) -> None:
    """Raise a ValueError if one process's weights alone, at a byte each, need more than `device_memory`; fast for any number of layers."""
    count = parameter_count(config.model, vocabulary(config))
    share = count // config.parallel.axes(1).model
    if share > device_memory:
        raise ValueError(
            f"the model has {count:.3g} parameters, {share:.3g} of them per process, but the device has "
            f"{device_memory / GIB:.1f} GiB: lower --num-layers, --hidden-size, --ffn-hidden-size, --kv-channels or vocabulary, "
            "or raise --tensor-model-parallel-size or --pipeline-model-parallel-size"
        )


def _remedies(config: Config, rank: Rank, copies: int) -> Iterator[str]:
    """Iterate over settings that reduce a rank's memory, the cheapest first. `copies`: data-parallel ranks, over which ZeRO shards."""
    states = rank.weight + sum(rank.states.values())
    if not config.shards_optimizer:
        yield "add --use-distributed-optimizer"
    if config.parallel.pipeline_model_parallel_size > 1 and captured(config):  # each micro-batch in flight has its own memory
        yield "add --cuda-graph none"
    if rank.activations > states / 4:
        if config.training.micro_batch_size > 1:
            yield f"lower --micro-batch-size {config.training.micro_batch_size}"
        if saved_activations(config.precision) == AS_IT_IS:
            yield "add --save-activations coat"
        if config.training.recompute_granularity is None and config.precision.fp8_experts(config.model):
            yield "add --recompute-granularity selective --recompute-modules mlp"
        elif config.training.recompute_granularity is None:
            yield "add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if not config.precision.named.fp8:
        yield f"use --opt-level {'O3' if copies > 2 else 'O2'}"  # bytes per parameter: 1 + 6 / N, and 2 + 4 / N
    more, experts = "--tensor-model-parallel-size or --pipeline-model-parallel-size", config.model.num_experts
    if experts is not None and rank.activations <= states and config.parallel.expert_model_parallel_size < experts:
        more = f"--expert-model-parallel-size, {more}"  # which also makes the buffers of a layer's tokens larger
    yield f"raise {more}"


def report(config: Config, world_size: int) -> str:
    """Return a text with grid, parameters, and GiB of the emptiest and the fullest rank."""
    parallel, training, ranks = config.parallel, config.training, plan(config, world_size)
    virtual = parallel.num_layers_per_virtual_pipeline_stage
    grid = (
        f"grid: {world_size} process{'es' if world_size > 1 else ''} = {config.parallel.axes(world_size)}"
        + (", sequence parallel" if parallel.sequence_parallel else "")
        + (f", {virtual} layers per virtual stage" if virtual else "")
        + (", ZeRO" if config.shards_optimizer else "")
    )
    tokens = config.global_batch_size(world_size) * config.model.seq_length
    batch = (
        f"batch: {config.global_batch_size(world_size)} sequences = {tokens:,} tokens, {config.num_micro_batches(world_size)} x "
        f"{training.micro_batch_size} per process; {config.iterations(world_size):,} iterations = "
        f"{config.samples_read(world_size) * config.model.seq_length / 1e9:.1f}B tokens"
    )
    if (ramp := config.batch_sizes(world_size).ramp) is not None:
        batch += f"; ramp: from {ramp.start} sequences by {ramp.increment} over {ramp.samples:,} samples"
    few, many = min(rank.parameters for rank in ranks), max(rank.parameters for rank in ranks)
    whole = parameter_count(config.model, vocabulary(config))
    active = active_parameter_count(config.model, vocabulary(config))
    of_experts = f", {active:,} active per token" if active < whole else ""
    assumed = f" ({'GPT-2' if config.model.vocab_size is None else 'of the preset or --vocab-size'}; there is no tokenizer)"
    size = (
        f"parameters: {whole:,}{of_experts}; per process {few:,}"
        + (f" to {many:,}" if many > few else "")
        + f"; vocabulary {vocabulary(config):,}{assumed if config.data.tokenizer_type is None else ''}"
    )
    columns = ("weight", *ranks[0].states, "gradient", "accumulated", "activations", "total")
    table = [f"{'GiB per process, ' + config.precision.name:<34}" + "".join(f"{name:>12}" for name in columns)]
    for what, rank in (("least", min(ranks, key=lambda rank: rank.total)), ("fullest", max(ranks, key=lambda rank: rank.total))):
        sizes = {**vars(rank), **rank.states, "total": rank.total}
        where = f"{what}: stage {rank.stage}, data-parallel {rank.copy}"
        table.append(f"{where:<34}" + "".join(f"{sizes[name] / GIB:>12.2f}" for name in columns))
    eager = plan(replace(config, training=replace(training, cuda_graph="none")), world_size)
    if (graphs := max(rank.total for rank in ranks) - max(rank.total for rank in eager)) > 0:
        table.append(
            f"add --cuda-graph none to save the {graphs / GIB:.2f} GiB that CUDA graphs of pipeline stages use on the fullest rank"
        )
    if mask := document_mask(config):
        table.append(f"activations include {mask / GIB:.2f} GiB per micro-batch in flight for the mask of --reset-attention-mask")
    return "\n".join([grid, batch, size, *table])
