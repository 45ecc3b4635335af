"""Whether a configuration can be captured in CUDA graphs, independent of the machine, for the graphs and for planning."""

from collections.abc import Sequence

import torch

from megatron.lm.config import Config
from megatron.lm.config.sections.baselines import PeerRecipe


def obstacle(config: Config) -> str | None:
    """Return why the steps of such a run cannot be captured on any GPU, or None if they can."""
    parallel, training, model = config.parallel, config.training, config.model
    obstacles = {
        "Transformer Engine's layers are not captured": isinstance(config.precision.named, PeerRecipe),
        # On two H200s: "operation would make the legacy stream depend on a capturing blocking stream", in backward.
        "without --sequence-parallel the all-reduces of tensor-parallel layers are not captured": parallel.tensor_model_parallel_size > 1
        and not parallel.sequence_parallel,
        "dropout draws random numbers": model.hidden_dropout > 0 or model.attention_dropout > 0,
        "recomputation outside the fused FP8 layers saves random states": _saves_random_states(config),
        "recomputation in a layer that --fp8-guard raises saves random states": training.recompute_granularity is not None
        and config.precision.fp8_guard,
        "--grad-accum-on owner sends gradients in every micro-batch, and chunks of pipeline stages end theirs at different times": (
            config.precision.grad_accum == "owner" and parallel.pipeline_model_parallel_size > 1
        ),
        "FP8 sums round the last gradient with its sum only once, and graphs of pipeline stages do not know which is last": (
            config.precision.grad_accum in ("fp8", "fp8-sr") and parallel.pipeline_model_parallel_size > 1
        ),
        "experts that are neither FP8 nor BF16 with widths in multiples of 8 are multiplied one by one, by sizes that the host reads": (
            _reads_sizes(config)
        ),
    }
    return next((reason for reason, holds in obstacles.items() if holds), None)


def _reads_sizes(config: Config) -> bool:
    """Whether experts outside FP8 run in a loop over them: PyTorch's kernel (`torch.nn.functional.grouped_mm`) is for BF16 alone."""
    model = config.model
    if len(config.fp8_experts) == len(model.moe_layers):
        return False
    return config.precision.named.compute_dtype is not torch.bfloat16 or model.hidden_size % 8 > 0 or model.expert_size % 8 > 0


def _saves_random_states(config: Config) -> bool:
    training, model = config.training, config.model
    if training.recompute_granularity is None or training.recompute_granularity == "full":
        return training.recompute_granularity == "full"
    if model.moe_layers:  # whose attention is not fused
        everywhere = len(config.fp8_experts) == model.num_layers
        return not (everywhere and config.recomputes_fc1_of_experts and training.recompute_modules == ("mlp",))
    return not config.fuses_layers or bool(config.layers_in_bf16)


def captured(config: Config) -> bool:
    """Return whether steps are CUDA graphs on a GPU with Triton and NCCL."""
    return config.training.cuda_graph != "none" and obstacle(config) is None


def slots(stage: int, stages: int, chunks: int, micro_batches: int) -> Sequence[int]:
    """Return the maximum number of micro-batches in flight on each chunk of a pipeline stage, for which graphs reserve memory.

    This follows megatron-core's schedules: 1F1B; or interleaved 1F1B after 2 (P - p - 1) + (V - 1) P warm-up forwards, with P micro-batches
    through each chunk before the next.

    Args:
        stage: p, in 0 .. P - 1.
        stages: P.
        chunks: V, per stage.
        micro_batches: per step; a multiple of P if interleaved.
    """
    if chunks == 1:
        return [min(micro_batches, stages - stage)]
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
    under_way, most = [0] * chunks, [0] * chunks
    for number in range(micro_batches * chunks):
        chunk = number % (stages * chunks) // stages
        under_way[chunk] += 1
        most[chunk] = max(most[chunk], under_way[chunk])
        if number >= ahead:
            under_way[chunks - 1 - (number - ahead) % (stages * chunks) // stages] -= 1
    return most
