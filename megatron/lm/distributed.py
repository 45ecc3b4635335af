"""Data parallelism of the trainer: which gradient travels in which format, exchanged as the flags say."""

from megatron.core import parallel_state
from torch import nn

from megatron.lm.config import Config
from megatron.lm.optim import parameter_groups
from msamp.comm.grad_sync import GradSync
from msamp.numerics.recipe import Recipe
from msamp.parallel.data_parallel import grad_sync


def build_grad_sync(model: nn.Module, config: Config, recipe: Recipe) -> GradSync:
    """The synchroniser of this rank's gradients, told by megatron-core's schedule which micro-batch is the last."""
    communication = config.communication
    sync = grad_sync(
        model,
        {p: group["formats"].grad for group in parameter_groups(model, recipe) for p in group["params"]},
        parallel_state.get_data_parallel_group(),
        bucket_elements=communication.bucket_size,
        shard=config.shards_optimizer,
        exchange=communication.grad_exchange,
        scaling=communication.gradient_scaling,
        mu_rule=communication.mu_adaptation,
        accumulate=config.precision.grad_accum,
        overlap=communication.overlap_grad_reduce,
        seed=config.training.seed,
    )
    model.config.no_sync_func = sync.no_sync  # type: ignore[union-attr]
    return sync
