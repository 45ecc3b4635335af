"""What a run prints at its start: precision, grid, memory and what was chosen for this machine."""

from dataclasses import asdict
from typing import Any

import torch

from megatron.lm.config import ModelConfig, ParallelConfig, PrecisionConfig
from megatron.lm.config.presets import parameter_count
from megatron.lm.model import fp8_layers
from megatron.lm.model.linear import travels
from megatron.lm.run.reports.log_line import wrapped
from megatron.lm.run.reports.metrics import Metrics, least_and_most
from megatron.lm.training.optimizer import bytes_per_parameter
from megatron.lm.training.state import Training
from msamp.nn.precision_guard import LayerGuard


def announce(model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig, training: Training, metrics: Metrics) -> None:
    """Print the lines on rank 0, and write the row of kind "precision" to the metrics. Collective."""
    sizes, linears, wide = bytes_per_parameter(training.optimizer), training.linears, precision.layers_in_bf16(model.num_layers)
    low, high = least_and_most(sum(p.numel() for p in training.model.parameters()) * sum(sizes.values()) / 2**30)
    rows = model.padded_vocab_size(training.vocab_size, parallel.tensor_model_parallel_size)
    parameters = parameter_count(model, rows)
    counts: dict[str, Any] = {"layers": fp8_layers.linear_layers(model), "bf16": linears.bf16, "gain": linears.gains}
    counts |= {"reason": linears.reason} | ({"layers_in_bf16": sorted(wide)} if wide else {})
    row = {"kind": "precision", "recipe": precision.name, "parameters": parameters, "bytes_per_parameter": sizes, "linears": counts}
    paper = {"as_published": precision.as_published} if precision.as_published else {}
    metrics.begin(row | paper | {"state_gib_min": low, "state_gib_max": high})
    if not metrics.main:
        return
    published = f" as published ({precision.as_published})" if paper else ""
    listed = ", ".join(f"{key} {size:.2f}" for key, size in sizes.items())
    travel = travels(training.model)
    lines = (
        fp8_layers.describe(model, precision, linears),
        linears.attention,
        fp8_layers.describe_experts(model, parallel, precision),
        None if training.guard is None else describe_guard(training.guard),
        "CUDA graphs: {} ({})".format(*training.cuda_graph),
        None if travel is None else f"tensor parallelism: activations travel {travel}",
        f"precision {precision.name}{published}: {sum(sizes.values()):.2f} bytes per parameter ({listed})",
        f"{_describe_grid(model, parallel)}{', ZeRO' if training.grad_sync.shard else ''}, {training.grad_sync}",
    )
    for line in filter(None, lines):
        print(wrapped(line))
    state_gib = " to ".join(dict.fromkeys((f"{low:.2f}", f"{high:.2f}")))
    steps = f"micro-batches per step {training.micro_batches}"
    print(f"{parameters / 1e6:.1f}M parameters, model state {state_gib} GiB per process, {steps}", flush=True)


def _describe_grid(model: ModelConfig, parallel: ParallelConfig) -> str:
    """Return `4 processes (tensor 2 with sequence, pipeline 2 x 2 virtual, data 1)`, and other axes if they are used."""
    processes = torch.distributed.get_world_size()
    if parallel.unit == 1:
        return f"{processes} processes"
    axes, stages = parallel.axes(processes), parallel.virtual_stages(model.num_layers)
    sequence = " with sequence" if parallel.sequence_parallel else ""
    context = f", context {axes.context}" if axes.context > 1 else ""
    experts = f", experts: tensor {axes.expert_tensor}, expert {axes.expert}, data {axes.expert_data}" if axes.splits_experts else ""
    pipeline = f"pipeline {axes.pipeline}{f' x {stages} virtual' if stages else ''}"
    return f"{processes} processes (tensor {axes.tensor}{sequence}{context}, {pipeline}, data {axes.data}{experts})"


def describe_guard(guard: LayerGuard) -> str:
    """Return a line about the guard for the start of a run."""
    bounds = asdict(guard.bounds)
    listed = f"saturation {bounds['saturation']:g}, underflow {bounds['underflow']:g}, SQNR {bounds['sqnr_db']:g} dB"
    listed += f", shrinkage {bounds['shrinkage']:g}"
    raised = f"; {len(guard.raised)} of them are in BF16" if guard.raised else ""
    return f"FP8 guard: {len(guard.names)} linear layers, checked every {guard.every} steps for {listed}{raised}"
