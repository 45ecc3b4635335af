"""What of a configuration can be captured in CUDA graphs, whatever the machine: for the graphs, and for what is planned beforehand."""

from collections.abc import Sequence

from megatron.lm.config import Config
from megatron.lm.config.baselines import PeerRecipe


def obstacle(config: Config) -> str | None:
    """Why the steps of such a run cannot be captured on any GPU; None where they can."""
    parallel, training, model = config.parallel, config.training, config.model
    found = {
        "Transformer Engine's layers are not captured": isinstance(config.precision.named, PeerRecipe),
        # On two H200s: "operation would make the legacy stream depend on a capturing blocking stream", in backward.
        "without --sequence-parallel the sums of tensor-parallel layers are not captured": parallel.tensor_model_parallel_size > 1
        and not parallel.sequence_parallel,
        "dropout draws random numbers": model.hidden_dropout > 0 or model.attention_dropout > 0,
        "recomputation outside the fused FP8 layers saves random states": training.recompute_granularity == "full"
        or (training.recompute_granularity is not None and not config.fuses_layers),
        # Each sum of theirs is a new tensor, and fp8-sr draws random numbers.
        "--grad-accum-dtype fp8 and fp8-sr do not add up in place": config.precision.grad_accum in ("fp8", "fp8-sr"),
        "--grad-accum-on owner sends gradients in every micro-batch": config.precision.grad_accum == "owner",
    }
    return next((reason for reason, holds in found.items() if holds), None)


def captured(config: Config) -> bool:
    """Whether steps are CUDA graphs on a GPU with Triton and NCCL: of pipeline stages where the flag asks for them."""
    asked = config.training.cuda_graph
    return asked != "none" and (asked is not None or config.parallel.pipeline_model_parallel_size == 1) and obstacle(config) is None


def slots(stage: int, stages: int, chunks: int, micro_batches: int) -> Sequence[int]:
    """Of each chunk of a pipeline stage, how many micro-batches are under way on it at once at most: what graphs keep memory for.

    As megatron-core's schedules have it: 1F1B, and interleaved a forward and a backward in turn after 2 (P - p - 1) + (V - 1) P forwards, P
    micro-batches through each chunk before the next.

    Args:
        stage: p of the stages 0 .. P - 1.
        stages: P.
        chunks: V, on every stage.
        micro_batches: of a step; interleaved a multiple of P.
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
