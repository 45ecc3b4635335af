"""Refusals of what no process of a grid, or no host, can hold: now, and not after minutes of allocating."""

from collections.abc import Iterator

from megatron.lm.config import Config, flag
from megatron.lm.config.precision import saved_activations
from megatron.lm.config.presets import parameter_count
from megatron.lm.planning.memory import GIB, RESERVED, Rank, plan, vocabulary
from msamp.nn.saved_activations import AS_IT_IS

ORDER_BYTES = 20  # a sample in the indices of megatron-core's GPTDataset: its place in the data, and in the shuffled order


def check_fits(config: Config, world_size: int, device_memory: float, reserved: int = RESERVED) -> None:
    """Raise a ValueError where the fullest rank and `reserved` need more than `device_memory` bytes."""
    check_weights(config, device_memory)
    fullest = max(plan(config, world_size), key=lambda rank: rank.total)
    if fullest.total + reserved > device_memory:
        beside = f" and {reserved / GIB:g} for CUDA and NCCL" if reserved else ""
        raise ValueError(
            f"pipeline stage {fullest.stage} needs {fullest.total / GIB:.1f} GiB a process{beside}, and the device has "
            f"{device_memory / GIB:.1f}{' (--device-memory-gib)' if reserved else ''}: {', '.join(_remedies(config, fullest))}"
        )


def check_weights(config: Config, device_memory: float) -> None:
    """Raise a ValueError where a process's weights alone, a byte each, are more than `device_memory` bytes; at once, however many."""
    parallel, count = config.parallel, parameter_count(config.model, vocabulary(config))
    share = count // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    if share > device_memory:
        raise ValueError(
            f"the model has {count:.3g} parameters, of which a process would hold {share:.3g}, and the device has "
            f"{device_memory / GIB:.1f} GiB: take smaller --num-layers, --hidden-size, --ffn-hidden-size, --kv-channels or vocabulary, "
            "or raise --tensor-model-parallel-size or --pipeline-model-parallel-size"
        )


def check_data_order(config: Config, world_size: int, host_memory: float) -> None:
    """Raise a ValueError where the order of the samples that a run reads is more than `host_memory` bytes."""
    batch, training = config.global_batch_size(world_size), config.training
    for name, iterations in (("train_iters", training.train_iters), ("eval_iters", training.eval_iters)):
        size = iterations * batch * ORDER_BYTES
        if size > host_memory:
            raise ValueError(
                f"{flag(name)} {iterations} reads {iterations * batch:.3g} sequences, and their order takes {size / GIB:.1f} GiB, and this "
                f"machine has {host_memory / GIB:.1f}: lower it, or --global-batch-size {batch}"
            )


def _remedies(config: Config, rank: Rank) -> Iterator[str]:
    """What would make a rank smaller, the cheapest first."""
    states = rank.weight + sum(rank.states.values())
    if not config.shards_optimizer:
        yield "add --use-distributed-optimizer"
    if rank.activations > states / 4:
        if config.training.micro_batch_size > 1:
            yield f"lower --micro-batch-size {config.training.micro_batch_size}"
        if saved_activations(config.precision) == AS_IT_IS:
            yield "add --save-activations coat"
        if config.training.recompute_granularity is None:
            yield "add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if not config.precision.named.fp8:
        yield "use --opt-level O3"
    yield "raise --tensor-model-parallel-size or --pipeline-model-parallel-size"
