"""Rules for batches, the learning rate's schedule and recomputation."""

from megatron.lm.config.rules.precision import refusal
from megatron.lm.config.sections.batch_sizes import MOST_SIZES
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.whole import Config, Problems, Rules


def batches(config: Config, world_size: int) -> Problems:
    """World size must be divisible by the grid's sizes, the global batch by micro-batch x DP, micro-batches of an interleaved pipeline by
    PP."""
    parallel, micro = config.parallel, config.training.micro_batch_size
    pp = parallel.pipeline_model_parallel_size
    if world_size < 1 or world_size % parallel.unit:
        sizes = " x ".join(f"{flag(setting)} {size}" for setting, size in parallel.given.items())
        yield f"{world_size} processes do not fit {sizes}: start a multiple of {parallel.unit}, or lower these sizes"
        return
    copies = config.data_parallel_size(world_size)
    size = config.global_batch_size(world_size)
    if size % (micro * copies):
        yield (
            f"--global-batch-size {size} is not divisible by --micro-batch-size {micro} x {copies} data-parallel processes: "
            f"choose a multiple of {micro * copies}"
        )
    elif config.training.rampup_batch_size:
        yield from _ramp(config, world_size)
    elif parallel.num_layers_per_virtual_pipeline_stage is not None and config.num_micro_batches(world_size) % pp:
        yield (
            f"interleaved pipelining requires the {config.num_micro_batches(world_size)} micro-batches of a step to be a multiple of "
            f"--pipeline-model-parallel-size {pp}: choose --global-batch-size as a multiple of {micro * copies * pp}"
        )


def _ramp(config: Config, world_size: int) -> Problems:
    """`--rampup-batch-size`: three numbers, and each batch of the ramp must be as divisible as the last one."""
    words, size = config.training.rampup_batch_size, config.global_batch_size(world_size)
    given = f"--rampup-batch-size {' '.join(map(str, words))}"
    if len(words) != 3:
        yield f"{given}: give three numbers, START INCREMENT SAMPLES, such as 32 32 1000000"
        return
    start, increment, _ = words
    if start >= size:
        yield f"{given} starts at {start} sequences, and --global-batch-size is {size}: start below it, or drop the ramp"
    elif (size - start) % increment:
        yield (
            f"{given}: {size - start} sequences from {start} to --global-batch-size {size} are not a multiple of the increment "
            f"{increment}: choose a divisor of {size - start}"
        )
    elif (size - start) // increment > MOST_SIZES:
        yield f"{given} has {(size - start) // increment:,} batch sizes: choose an increment of at least {-(-(size - start) // MOST_SIZES)}"
    virtual = config.parallel.num_layers_per_virtual_pipeline_stage is not None
    row = config.training.micro_batch_size * max(1, config.data_parallel_size(world_size))  # 0 where `batches` refuses the processes
    row *= config.parallel.pipeline_model_parallel_size if virtual else 1
    for name, value in (("start", start), ("increment", increment)):
        if value % row:
            stages = " x pipeline stages (interleaved)" if virtual else ""
            yield f"{given}: the {name} {value} is not divisible by micro-batch x data-parallel size{stages}: choose a multiple of {row}"


def length(config: Config, world_size: int) -> Problems:
    """The run's length, its warm-up and its decay must be given once, all in iterations or all in samples."""
    training, optimizer = config.training, config.optimizer
    if (training.train_iters is None) == (training.train_samples is None):
        both = f"--train-iters {training.train_iters} and --train-samples {training.train_samples} contradict each other"
        yield f"{'the length of the run is missing' if training.train_iters is None else both}: give --train-iters N or --train-samples N"
        return
    unit, other = ("iters", "samples") if training.train_samples is None else ("samples", "iters")
    ramp_is_valid = bool(training.rampup_batch_size) and not any(_ramp(config, world_size))
    if training.rampup_batch_size and unit == "iters":
        same = f"--train-samples {config.samples_read(world_size)} for as many iterations" if ramp_is_valid else "--train-samples"
        yield (
            f"--rampup-batch-size is for runs that count samples, as in Megatron-LM, and --train-iters {training.train_iters} counts "
            f"iterations: give {same}, and --lr-warmup-samples and --lr-decay-samples"
        )
    for name in ("lr_warmup", "lr_decay", "lr_wsd_decay"):
        value = getattr(optimizer, f"{name}_{other}")
        if value:
            yield f"{flag(f'{name}_{other}')} {value} does not go with --train-{unit}: give {flag(f'{name}_{unit}')}, or --train-{other}"
    judged = ramp_is_valid or not training.rampup_batch_size
    if training.train_samples is not None and judged and config.iterations(world_size) < 1:
        yield f"--train-samples {training.train_samples} is less than a global batch of {config.global_batch_size(world_size)}: give more"


def schedule(config: Config, world_size: int) -> Problems:
    """Learning rates, warm-up and decay must be in order."""
    optimizer, training = config.optimizer, config.training
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}: give a value in [0, {optimizer.lr:g}]"
    if optimizer.lr_warmup_init > optimizer.lr:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init:g} is above --lr {optimizer.lr:g}: give a value in [0, {optimizer.lr:g}]"
    if (training.train_iters is None) == (training.train_samples is None):
        return  # `length` says so
    unit, steps = "iters" if training.train_samples is None else "samples", config.schedule_steps
    if optimizer.lr_warmup_fraction is not None and getattr(optimizer, f"lr_warmup_{unit}"):
        yield f"--lr-warmup-fraction {optimizer.lr_warmup_fraction:g} and --lr-warmup-{unit} contradict each other: give one of them"
    elif steps.warmup >= steps.decay:
        last = f"--train-{unit}" if getattr(optimizer, f"lr_decay_{unit}") is None else f"--lr-decay-{unit}"
        yield f"--lr-warmup-{unit} {steps.warmup} must end before {last} {steps.decay}: give a number in [0, {steps.decay - 1}]"
    if optimizer.lr_decay_style == "WSD" and steps.wsd is None:
        yield f"--lr-decay-style WSD needs the length of its decay: add --lr-wsd-decay-{unit} N"
    elif optimizer.lr_decay_style == "WSD" and steps.wsd is not None and steps.wsd > steps.decay - steps.warmup:
        yield (
            f"--lr-wsd-decay-{unit} {steps.wsd} is more than the {steps.decay - steps.warmup:g} {unit} between warm-up and the end of the "
            "decay: give at most that"
        )
    least, name = optimizer.min_lr, "--min-lr"
    if optimizer.decoupled_min_lr is not None:
        least, name = optimizer.decoupled_min_lr, "--decoupled-min-lr"
    if optimizer.decoupled_lr is not None and least > optimizer.decoupled_lr:
        yield f"{name} {least:g} is above --decoupled-lr {optimizer.decoupled_lr:g}: give a value in [0, {optimizer.decoupled_lr:g}]"


def recomputation(config: Config, world_size: int) -> Problems:
    """A fused layer does not recompute attention with dropout, and a unit has at most the layers of a stage."""
    training, parallel = config.training, config.parallel
    recomputed = training.recompute_modules or ("core_attn",)
    fused = refusal(config.precision) is None and config.fuses_layers
    if training.recompute_granularity == "selective" and fused and config.model.attention_dropout and "core_attn" in recomputed:
        yield (
            f"a fused layer does not recompute attention with --attention-dropout {config.model.attention_dropout:g}: "
            "give --recompute-modules mlp, or drop one of them"
        )
    stage = max(1, config.model.num_layers // parallel.pipeline_model_parallel_size)
    layers = min(stage, parallel.num_layers_per_virtual_pipeline_stage or stage)
    if training.recompute_num_layers is not None and training.recompute_num_layers > layers:
        what = "pipeline stage" if layers == stage else "virtual pipeline stage"
        yield f"--recompute-num-layers {training.recompute_num_layers} is more than the {layers} layers of a {what}: give 1 to {layers}"


RULES: Rules = {
    batches: ("training", "parallel"),
    length: ("optimizer", "training", "parallel"),
    schedule: ("optimizer", "training"),
    recomputation: ("model", "training", "parallel", "precision"),
}
