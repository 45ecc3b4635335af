"""Build the training state of this rank from a configuration."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from megatron.lm import checkpoint
from megatron.lm.config import Config
from megatron.lm.config.rules.precision import attention_refusal
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.graphs import step_graph
from megatron.lm.model import fp8_layers
from megatron.lm.model.attention import prepare_fp8
from megatron.lm.model.gpt import build_model
from megatron.lm.processes import process_groups
from megatron.lm.processes.agreement import rank_0_decides
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
    model, parallel, training = config.model, config.parallel, config.training
    saved = partial(checkpoint.saved_precision, config.checkpoint)
    settings = (model, parallel, config.precision, training)
    decide = partial(fp8_layers.decide, *settings, fp8_layers.default_measure(), saved, attention_refusal(config))
    precision, linears = rank_0_decides(decide)
    config = replace(config, precision=precision)
    if precision.attention_precision == "fp8":
        prepare_fp8(model, parallel, training.micro_batch_size)
    cuda_graph = step_graph.choose(model, parallel, precision, training)  # raises before the model is built
    recipe, sent, grid = build_recipe(precision), WireBytes(), Grid.current()
    if recipe.fp8:
        warn_if_emulated(process_groups.device())
    build = partial(build_model, model, parallel, precision, training, recipe, vocab_size, sent=sent)
    stages = parallel.virtual_stages(model.num_layers)
    gpt: nn.Module = build() if stages is None else nn.ModuleList([build(vp_stage=vp_stage) for vp_stage in range(stages)])
    trained = gpt if around is None else around(gpt)
    grad_sync = build_grad_sync(
        trained,
        config.communication,
        recipe,
        shard=config.shards_optimizer,
        accumulate=precision.grad_accum,
        seed=training.seed,
        sent=sent,
        grid=grid,
    )
    loss_scaler = build_loss_scaler(precision, recipe)
    if loss_scaler is not None:
        for part in chunks(gpt):
            part.config.grad_scale_func = loss_scaler.multiply
    overlap = config.communication.overlap_param_gather
    optimizer = build_optimizer(trained, config.optimizer, recipe, grad_sync, loss_scaler, seed=training.seed, overlap_param_gather=overlap)
    return Training(
        config=config,
        grid=grid,
        model=gpt,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.optimizer, config.schedule_steps),
        grad_sync=grad_sync,
        scaling=ScalingState(gpt),
        loss_scaler=loss_scaler,
        vocab_size=vocab_size,
        linears=linears,
        experts=ExpertLoad(gpt, model, grid),
        guard=build_guard(gpt, precision),
        cuda_graph=cuda_graph,
    )
