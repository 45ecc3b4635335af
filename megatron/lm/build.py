"""Build the training state of this rank from a configuration."""

from collections.abc import Callable

from torch import nn

from megatron.lm import checkpoint
from megatron.lm.config import Config
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.graphs import step_graph
from megatron.lm.model import fp8_layers
from megatron.lm.model.attention import check_precision
from megatron.lm.model.gpt import build_model
from megatron.lm.processes import process_groups
from megatron.lm.processes.grid import Grid
from megatron.lm.training.expert_load import ExpertLoad
from megatron.lm.training.fp8_guard import build_guard
from megatron.lm.training.gradients import build_grad_sync, chunks
from megatron.lm.training.optimizer import build_loss_scaler, build_optimizer, build_schedule
from megatron.lm.training.state import Training
from msamp.comm.counters import WireBytes
from msamp.kernels.scaled_mm import warn_if_emulated
from msamp.nn.scaling_state import ScalingState


def build_training(config: Config, vocab_size: int, around: Callable[[nn.Module], nn.Module] | None = None) -> Training:
    """Build model, optimizer, schedule and gradient synchronizer of this rank; requires `process_groups.initialize`. Collective.

    Args:
        config: if it does not define which linear layers are FP8, this function decides, and `Training.config` has the result.
        vocab_size: of the tokenizer (the model pads it).
        around: wraps the model in a module with additional parameters, such as a classifier. They are trained too, but checkpoints do not
            contain them. The module must have the model's `config`.

    Raises:
        ValueError: on every rank, if the checkpoint to resume from is damaged, a linear layer cannot be measured, or the flags request
            CUDA graphs or FP8 attention where they are impossible.
    """
    check_precision(config)
    config, linears = fp8_layers.agree_on_layers(config, lambda: checkpoint.saved_precision(config))
    check_precision(config)  # of what --attention-precision auto chose
    step_graph.choose(config)  # raises before the model is built
    recipe = build_recipe(config.precision)
    if recipe.fp8:
        warn_if_emulated(process_groups.device())
    sent = WireBytes()
    stages = config.virtual_stages
    model: nn.Module
    if stages is None:
        model = build_model(config, recipe, vocab_size, sent=sent)
    else:
        model = nn.ModuleList([build_model(config, recipe, vocab_size, vp_stage, sent) for vp_stage in range(stages)])
    grid, trained = Grid.current(), model if around is None else around(model)
    grad_sync = build_grad_sync(trained, config, recipe, sent, grid)
    loss_scaler = build_loss_scaler(config.precision, recipe)
    if loss_scaler is not None:
        for part in chunks(model):
            part.config.grad_scale_func = loss_scaler.multiply
    optimizer = build_optimizer(
        trained,
        config.optimizer,
        recipe,
        grad_sync,
        loss_scaler,
        seed=config.training.seed,
        overlap_param_gather=config.communication.overlap_param_gather,
    )
    return Training(
        config=config,
        grid=grid,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.optimizer, config.schedule_steps),
        grad_sync=grad_sync,
        scaling=ScalingState(model),
        loss_scaler=loss_scaler,
        vocab_size=vocab_size,
        linears=linears,
        experts=ExpertLoad(model, config.model, grid),
        guard=build_guard(model, config.precision),
    )
