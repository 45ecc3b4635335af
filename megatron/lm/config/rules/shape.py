"""Rules for the shape of the model, and how tensor, pipeline and context parallelism split it."""

import math

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
    if heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}: choose a divisor of {heads}"
    if model.max_positions < model.seq_length:
        yield (
            f"--max-position-embeddings {model.max_positions} is less than --seq-length {model.seq_length}: "
            f"give at least {model.seq_length}, or drop it"
        )


def tensor_parallel_shape(config: Config, world_size: int) -> Problems:
    """Dimensions that tensor and sequence parallelism split must be divisible. The padded vocabulary always is."""
    model, parallel = config.model, config.parallel
    tp, heads = parallel.tensor_model_parallel_size, model.num_attention_heads
    size_flag = f"--tensor-model-parallel-size {tp}"
    cut = [("num_attention_heads", heads), ("hidden_size", model.hidden_size), ("ffn_hidden_size", model.ffn_size)]
    cut += [("seq_length", model.seq_length)] if parallel.sequence_parallel else []
    for name, size in cut:
        if size % tp:
            yield f"{flag(name)} {size} is not divisible by {size_flag}: choose a multiple of {tp}"
    if heads % tp == 0 and model.group_query_attention and model.query_groups % tp:
        yield f"--num-query-groups {model.query_groups} is not divisible by {size_flag}: choose a multiple of {tp}, up to {heads}"
    if tp > 1 and model.qk_layernorm and model.qk_layernorm_scope == "projection":
        yield (
            f"--qk-layernorm-scope projection normalizes over all heads, and {size_flag} splits them: drop --tensor-model-parallel-size, "
            "or use --qk-layernorm-scope head"
        )


def pipeline_shape(config: Config, world_size: int) -> Problems:
    """Layers must be divisible by stages and virtual stages."""
    layers, stages = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    virtual = config.parallel.num_layers_per_virtual_pipeline_stage
    if stages == 1:
        return
    if layers % stages:
        given = f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {stages}"
        yield f"{given}: choose a multiple of {stages * (virtual or 1)}"
    elif virtual is not None and (virtual == layers // stages or layers // stages % virtual):
        yield (
            f"--num-layers-per-virtual-pipeline-stage {virtual} is not a part of the {layers // stages} layers of a pipeline stage: give "
            "a smaller divisor of them, or drop it"
        )


def context_parallel_shape(config: Config, world_size: int) -> Problems:
    """Each process has two chunks of every sequence, which sequence parallelism splits further. With an all-to-all it also has its share of
    the heads of its tensor-parallel part."""
    parallel, model = config.parallel, config.model
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    given, parts = f"--context-parallel-size {cp}", tp if parallel.sequence_parallel else 1
    multiple = math.lcm(2 * cp, cp * parts)
    if cp > 1 and model.seq_length % multiple:
        split = given + (f" with --sequence-parallel over {parts} processes" if parts > 1 else "")
        yield f"--seq-length {model.seq_length} is not divisible by {multiple}, as {split} requires: choose a multiple"
    if parallel.shares_heads and (model.query_groups % (tp * cp) or model.num_attention_heads % (tp * cp)):
        groups = "" if model.query_groups == model.num_attention_heads else f" in {model.query_groups} groups"
        per = given + (f" x --tensor-model-parallel-size {tp}" if tp > 1 else "")
        yield (
            f"--cp-comm-type a2a divides heads between processes, and {model.num_attention_heads} heads{groups} are not divisible by "
            f"{per}: use p2p, or another number of processes"
        )


def context_parallel_mask(config: Config, world_size: int) -> Problems:
    """A ring of parts of sequences takes no mask."""
    parallel = config.parallel
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type == "p2p" and config.data.reset_attention_mask:
        yield (
            f"--context-parallel-size {parallel.context_parallel_size} with --cp-comm-type p2p, a ring of parts of sequences, does not "
            "support the mask of --reset-attention-mask: use --cp-comm-type a2a, which has whole sequences, or drop the mask"
        )


RULES: Rules = {
    attention_shape: ("model",),
    tensor_parallel_shape: ("model", "parallel"),
    pipeline_shape: ("model", "parallel"),
    context_parallel_shape: ("model", "parallel"),
    context_parallel_mask: ("parallel", "data"),
}
