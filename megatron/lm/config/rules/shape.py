"""Rules for the shape of the model and how tensor and pipeline parallelism split it."""

import math

from megatron.lm.config.sections.model import FLASH_ATTENTION_PACKAGE
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.whole import Config, Problems, Rules


def attention_shape(config: Config, world_size: int) -> Problems:
    """Heads, groups of heads, positions."""
    model = config.model
    heads, groups = model.num_attention_heads, model.query_groups
    if model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {heads}: "
            f"choose a multiple of {heads}, or give the heads' width with --kv-channels"
        )
    elif int(model.head_size * model.rotary_percent) % 2 and model.position_embedding_type == "rope":
        yield (
            f"rotary position embeddings rotate pairs: {model.head_size} channels per head x --rotary-percent {model.rotary_percent:g} "
            "must be an even number; change --num-attention-heads or --kv-channels"
        )
    if model.num_query_groups is not None and not model.group_query_attention:
        yield f"--num-query-groups {model.num_query_groups} has no effect by itself: add --group-query-attention, or drop it"
    elif heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}: choose a divisor of {heads}"
    if model.qk_layernorm_scope != "head" and not model.qk_layernorm:
        yield f"--qk-layernorm-scope {model.qk_layernorm_scope} has no effect by itself: add --qk-layernorm, or drop it"
    if model.swiglu and model.squared_relu:
        yield "--swiglu and --squared-relu contradict each other: keep one of them"
    if model.max_positions < model.seq_length:
        yield (
            f"--max-position-embeddings {model.max_positions} is less than --seq-length {model.seq_length}: "
            f"give at least {model.seq_length}, or drop it"
        )


def positions(config: Config, world_size: int) -> Problems:
    """Resetting position ids requires learned embeddings, and flags of the rotary embedding require one."""
    model, kind = config.model, config.model.position_embedding_type
    if config.data.reset_position_ids and kind != "learned_absolute":
        yield (
            f"--reset-position-ids has no effect with --position-embedding-type {kind}, where only the distance between tokens counts: "
            "drop it, or use learned_absolute"
        )
    if kind == "none" and model.objective == "masked-lm":
        yield (
            "--position-embedding-type none leaves positions to causal attention, and --objective masked-lm attends to both sides: "
            "use rope or learned_absolute"
        )
    if model.rope_scaling_factor != type(model).rope_scaling_factor and not model.use_rope_scaling:
        yield f"--rope-scaling-factor {model.rope_scaling_factor:g} has no effect without --use-rope-scaling: add it, or drop the factor"
    given = {
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor,
    }
    for name, value in given.items():
        if value and kind != "rope":
            yield f"{name} changes the rotary embedding, and --position-embedding-type {kind} has none: drop it, or use rope"


def tensor_parallel_shape(config: Config, world_size: int) -> Problems:
    """Dimensions that tensor and sequence parallelism split must be divisible. The padded vocabulary always is."""
    model, parallel = config.model, config.parallel
    tp, heads = parallel.tensor_model_parallel_size, model.num_attention_heads
    size_flag = f"--tensor-model-parallel-size {tp}"
    cut: list[tuple[str, int, int]] = []
    if heads % tp:
        served = [n for n in range(tp, model.hidden_size + 1, tp) if model.kv_channels or model.hidden_size % n == 0]
        choice = _nearest(heads, served) or nearest_multiples(heads, tp)
        yield f"--num-attention-heads {heads} is not divisible by {size_flag}: choose {choice}"
    if heads % tp == 0 or model.kv_channels:  # else the suggested multiples would follow from a number of heads that must change
        cut.append(("hidden_size", model.hidden_size, tp if model.kv_channels else math.lcm(tp, heads)))
    if heads % tp == 0 and model.group_query_attention and heads % model.query_groups == 0 and model.query_groups % tp:
        legal = [groups for groups in _divisors(heads) if groups % tp == 0]
        yield f"--num-query-groups {model.query_groups} is not divisible by {size_flag}: choose {_nearest(model.query_groups, legal)}"
    cut.append(("ffn_hidden_size", model.ffn_size, tp))
    if parallel.sequence_parallel:
        cut.append(("seq_length", model.seq_length, tp))
    for name, size, multiple in cut:
        if size % tp:
            yield f"{flag(name)} {size} is not divisible by {size_flag}: choose {nearest_multiples(size, multiple)}"
    if tp > 1 and model.qk_layernorm and model.qk_layernorm_scope == "projection":
        yield (
            f"--qk-layernorm-scope projection normalizes over all heads, and {size_flag} splits them: drop --tensor-model-parallel-size, "
            "or use --qk-layernorm-scope head"
        )
    if parallel.sequence_parallel and tp == 1:
        yield (
            "--sequence-parallel splits sequences between tensor-parallel processes, and there is only one: drop it (after a preset: "
            "--no-sequence-parallel), or raise --tensor-model-parallel-size"
        )


def pipeline_shape(config: Config, world_size: int) -> Problems:
    """Layers must be divisible by stages and virtual stages."""
    layers, stages = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    virtual = config.parallel.num_layers_per_virtual_pipeline_stage
    if virtual is not None and stages == 1:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {virtual} interleaves pipeline stages, and there is only one: drop it, or raise "
            "--pipeline-model-parallel-size"
        )
    elif layers % stages:
        unit = stages * (virtual or 1)
        served = [n for n in range(unit, layers + 2 * unit + 1, unit) if virtual is None or n > unit]  # interleaving requires two of them
        yield f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {stages}: choose {_nearest(layers, served)}"
    elif virtual is not None and (virtual == layers // stages or layers // stages % virtual):
        smaller = _divisors(layers // stages)[:-1]
        whole = virtual == layers // stages
        yield (
            f"--num-layers-per-virtual-pipeline-stage {virtual} "
            + ("leaves nothing to interleave: it is a whole" if whole else f"does not divide the {layers // stages} layers of a")
            + f" pipeline stage: {f'choose {_nearest(virtual, smaller)}, or ' if smaller else ''}drop it"
        )


def megatron_format(config: Config, world_size: int) -> Problems:
    """A checkpoint in Megatron-LM's format must be one that Megatron-LM can load."""
    form, scope = config.checkpoint.ckpt_format, config.model.qk_layernorm_scope
    if form != "own" and scope != "head":
        yield f"--ckpt-format {form} has no norms of --qk-layernorm-scope {scope}, which Megatron-LM lacks: use own"


def nearest_multiples(value: int, of: int) -> str:
    """Return the multiple of `of` below `value` and the one above, as words."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def _divisors(value: int) -> list[int]:
    return [number for number in range(1, value + 1) if value % number == 0]


def _nearest(value: int, legal: list[int]) -> str:
    """Return the legal number below `value` and the one above, as words."""
    around = [*[number for number in legal if number < value][-1:], *[number for number in legal if number > value][:1]]
    return " or ".join(map(str, around))


def attention_kernel(config: Config, world_size: int) -> Problems:
    """Only attention kernels that come with PyTorch are supported."""
    if config.model.attention_backend == FLASH_ATTENTION_PACKAGE:
        yield (
            f"--attention-backend {FLASH_ATTENTION_PACKAGE} is a separate package, which has no wheel and is not supported: choose flash, "
            "PyTorch's own flash attention, cudnn, which is faster on Hopper, or auto"
        )


RULES: Rules = {
    attention_kernel: ("model",),
    attention_shape: ("model",),
    positions: ("model", "data"),
    tensor_parallel_shape: ("model", "parallel"),
    pipeline_shape: ("model", "parallel"),
    megatron_format: ("model", "checkpoint"),
}
