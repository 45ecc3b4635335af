"""Rules for batches, the learning rate's schedule, recomputation and determinism."""

from megatron.lm.config.rules.precision import refusal
from megatron.lm.config.rules.shape import nearest_multiples
from megatron.lm.config.schema import flag
from megatron.lm.config.whole import Config, Problems, Rules


def batches(config: Config, world_size: int) -> Problems:
    """World size over TP x PP, global batch over micro-batch x DP, micro-batches over an interleaved pipeline."""
    parallel, micro = config.parallel, config.training.micro_batch_size
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if world_size < 1 or world_size % (tp * pp):
        yield (
            f"{world_size} processes do not fit --tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}: "
            f"start {nearest_multiples(world_size, tp * pp)}, or lower the two sizes"
        )
        return
    copies = config.data_parallel_size(world_size)
    size = config.global_batch_size(world_size)
    if size % (micro * copies):
        yield (
            f"--global-batch-size {size} is not divisible by --micro-batch-size {micro} x {copies} data-parallel processes: "
            f"choose a multiple of {micro * copies}"
        )
    elif parallel.num_layers_per_virtual_pipeline_stage is not None and config.num_micro_batches(world_size) % pp:
        yield (
            f"interleaved pipelining wants the {config.num_micro_batches(world_size)} micro-batches of a step to be a multiple of "
            f"--pipeline-model-parallel-size {pp}: choose --global-batch-size as a multiple of {micro * copies * pp}"
        )


def schedule(config: Config, world_size: int) -> Problems:
    """Learning rates and warm-up in order."""
    optimizer, end = config.optimizer, config.lr_decay_iters
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}: give a value in [0, {optimizer.lr:g}]"
    if optimizer.lr_warmup_iters >= end:
        last = "--train-iters" if optimizer.lr_decay_iters is None else "--lr-decay-iters"
        yield f"--lr-warmup-iters {optimizer.lr_warmup_iters} must end before {last} {end}: give a number in [0, {end - 1}]"


def recomputation(config: Config, world_size: int) -> Problems:
    """The flags of full recomputation come together; the flag of selective recomputation comes with its granularity."""
    training, parallel = config.training, config.parallel
    if training.recompute_modules and training.recompute_granularity != "selective":
        modules = " ".join(training.recompute_modules)
        yield f"--recompute-modules {modules} has no effect by itself: add --recompute-granularity selective, or drop it"
    again = training.recompute_modules or ("core_attn",)
    fused = refusal(config.precision) is None and config.fuses_layers
    if training.recompute_granularity == "selective" and fused and config.model.attention_dropout and "core_attn" in again:
        yield (
            f"a fused layer does not recompute attention with --attention-dropout {config.model.attention_dropout:g}: "
            "give --recompute-modules mlp, or drop one of them"
        )
    for name in ("recompute_method", "recompute_num_layers"):
        value = getattr(training, name)
        if training.recompute_granularity != "full" and value is not None:
            yield f"{flag(name)} {value} has no effect by itself: add --recompute-granularity full, or drop it"
        if training.recompute_granularity == "full" and value is None:
            yield f"--recompute-granularity full needs {flag(name)}: add --recompute-method uniform --recompute-num-layers 1"
    stage = max(1, config.model.num_layers // parallel.pipeline_model_parallel_size)
    layers = min(stage, parallel.num_layers_per_virtual_pipeline_stage or stage)
    if training.recompute_num_layers is not None and training.recompute_num_layers > layers:
        what = "pipeline stage" if layers == stage else "virtual pipeline stage"
        yield f"--recompute-num-layers {training.recompute_num_layers} is more than the {layers} layers of a {what}: give 1 to {layers}"


def determinism(config: Config, world_size: int) -> Problems:
    """Operations that add up in any order do not go with `--deterministic`."""
    if config.training.deterministic and config.model.attention_backend == "cudnn":
        yield "--deterministic with --attention-backend cudnn: its backward adds up in any order; choose auto or flash"


RULES: Rules = {
    batches: ("training", "parallel"),
    schedule: ("optimizer", "training"),
    recomputation: ("model", "training", "parallel", "precision"),
    determinism: ("training", "model"),
}
