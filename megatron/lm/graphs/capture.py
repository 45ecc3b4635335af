"""Whether steps can be captured in CUDA graphs, independent of the machine, for the graphs and for planning."""

import torch

from megatron.lm.config import ModelConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from megatron.lm.config.sections.baselines import PeerRecipe


def obstacle(model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig, training: TrainingConfig) -> str | None:
    """Return why the steps of such a run cannot be captured on any GPU, or None if they can."""
    # PyTorch's kernel for experts outside FP8 (`torch.nn.functional.grouped_mm`) is for BF16 alone.
    grouped = precision.named.compute_dtype is torch.bfloat16 and model.hidden_size % 8 == model.expert_size % 8 == 0
    obstacles = {
        "Transformer Engine's layers are not captured": isinstance(precision.named, PeerRecipe),
        # On two H200s: "operation would make the legacy stream depend on a capturing blocking stream", in backward.
        "without --sequence-parallel the all-reduces of tensor-parallel layers are not captured": parallel.tensor_model_parallel_size > 1
        and not parallel.sequence_parallel,
        "dropout draws random numbers": model.hidden_dropout > 0 or model.attention_dropout > 0,
        "recomputation outside the fused FP8 layers saves random states": _saves_random_states(model, precision, training),
        "recomputation in a layer that --fp8-guard raises saves random states": training.recompute_granularity is not None
        and precision.fp8_guard,
        "--grad-accum-on owner sends gradients in every micro-batch, and chunks of pipeline stages end theirs at different times": (
            precision.grad_accum == "owner" and parallel.pipeline_model_parallel_size > 1
        ),
        "FP8 sums round the last gradient with its sum only once, and graphs of pipeline stages do not know which is last": (
            precision.grad_accum in ("fp8", "fp8-sr") and parallel.pipeline_model_parallel_size > 1
        ),
        "experts that are neither FP8 nor BF16 with widths in multiples of 8 are multiplied one by one, by sizes that the host reads": (
            len(precision.fp8_experts(model)) < len(model.moe_layers) and not grouped
        ),
    }
    return next((reason for reason, holds in obstacles.items() if holds), None)


def _saves_random_states(model: ModelConfig, precision: PrecisionConfig, training: TrainingConfig) -> bool:
    if training.recompute_granularity is None or training.recompute_granularity == "full":
        return training.recompute_granularity == "full"
    if model.moe_layers:  # whose attention is not fused
        everywhere = len(precision.fp8_experts(model)) == model.num_layers
        return not (everywhere and model.moe_shared_expert_intermediate_size is None and training.recompute_modules == ("mlp",))
    return not precision.fuses(model, precision.recipe) or bool(precision.layers_in_bf16(model.num_layers))
