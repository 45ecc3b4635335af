"""What a run prints at its start: precision, grid, memory and what was chosen for this machine."""

from dataclasses import asdict
from typing import Any

import torch

from megatron.lm.config import Config
from megatron.lm.config.blend_file import describe
from megatron.lm.config.presets import parameter_count
from megatron.lm.graphs import step_graph
from megatron.lm.model import fp8_layers
from megatron.lm.model.linear import travels
from megatron.lm.run.reports.log_line import wrapped
from megatron.lm.run.reports.metrics import Metrics, least_and_most
from megatron.lm.training.optimizer import bytes_per_parameter
from megatron.lm.training.state import Training
from msamp.nn.precision_guard import LayerGuard


def announce(config: Config, training: Training, metrics: Metrics) -> None:
    """Print the lines on rank 0, and write the row of kind "precision" to the metrics. Collective."""
    processes = torch.distributed.get_world_size()
    sizes = bytes_per_parameter(training.optimizer)
    low, high = least_and_most(sum(p.numel() for p in training.model.parameters()) * sum(sizes.values()) / 2**30)
    parameters = parameter_count(config.model, config.padded_vocab_size(training.vocab_size))
    state = {"state_gib_min": low, "state_gib_max": high}
    layers, linears = fp8_layers.linear_layers(config), training.linears
    counts: dict[str, Any] = {"layers": layers, "bf16": linears.bf16, "gain": linears.gains, "reason": linears.reason}
    if config.layers_in_bf16:
        counts["layers_in_bf16"] = sorted(config.layers_in_bf16)
    metrics.begin({"kind": "precision", "parameters": parameters, "bytes_per_parameter": sizes, "linears": counts} | state)
    if metrics.main:
        if training.iteration:
            print(f"resumed from {config.checkpoint.load} at iteration {training.iteration}")
        listed = ", ".join(f"{key} {size:.2f}" for key, size in sizes.items())
        zero = ", ZeRO" if training.grad_sync.shard else ""
        if config.logging.log_level == "debug":
            print(training.model)
        if (blend := describe(config.data.data_path or config.data.train_data_path)) is not None:
            print(wrapped(blend))
        print(wrapped(fp8_layers.describe(config, linears)))
        if linears.attention:
            print(wrapped(linears.attention))
        if (mixture := fp8_layers.describe_experts(config)) is not None:
            print(wrapped(mixture))
        if training.guard is not None:
            print(wrapped(describe_guard(training.guard)))
        print("CUDA graphs: {} ({})".format(*step_graph.choose(config)))
        if (travel := travels(training.model)) is not None:
            print(wrapped(f"tensor parallelism: activations travel {travel}"))
        print(wrapped(f"precision {config.precision.name}: {sum(sizes.values()):.2f} bytes per parameter ({listed})"))
        print(wrapped(f"{processes} processes{_describe_grid(config)}{zero}, {training.grad_sync}"))
        state_gib = " to ".join(dict.fromkeys((f"{low:.2f}", f"{high:.2f}")))
        steps = f"micro-batches per step {training.micro_batches}"
        print(f"{parameters / 1e6:.1f}M parameters, model state {state_gib} GiB per process, {steps}", flush=True)


def _describe_grid(config: Config) -> str:
    """Return ` (tensor 2 with sequence, pipeline 2 x 2 virtual, data 1)`, and other axes if they are used; empty for data alone."""
    parallel, axes = config.parallel, config.axes(torch.distributed.get_world_size())
    if parallel.unit == 1:
        return ""
    stages = config.virtual_stages
    sequence = " with sequence" if parallel.sequence_parallel else ""
    context = f", context {axes.context}" if axes.context > 1 else ""
    experts = f", experts: tensor {axes.expert_tensor}, expert {axes.expert}, data {axes.expert_data}" if axes.splits_experts else ""
    pipeline = f"pipeline {axes.pipeline}{f' x {stages} virtual' if stages else ''}"
    return f" (tensor {axes.tensor}{sequence}{context}, {pipeline}, data {axes.data}{experts})"


def describe_guard(guard: LayerGuard) -> str:
    """Return a line about the guard for the start of a run."""
    bounds = asdict(guard.bounds)
    listed = f"saturation {bounds['saturation']:g}, underflow {bounds['underflow']:g}, SQNR {bounds['sqnr_db']:g} dB"
    listed += f", shrinkage {bounds['shrinkage']:g}"
    raised = f"; {len(guard.raised)} of them are in BF16" if guard.raised else ""
    return f"FP8 guard: {len(guard.names)} linear layers, checked every {guard.every} steps for {listed}{raised}"
