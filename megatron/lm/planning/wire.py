"""Predict the bytes that a rank sends per step, by kind, from shapes, as `tools/bench/bench_grid.py` counts them.

A rank sends (n - 1) / n S of a tensor of S bytes over n ranks in an all-gather or a reduce-scatter, and twice that in an all-reduce.
"""

from typing import NamedTuple

from megatron.lm.config import LINEARS, Config
from megatron.lm.planning.experts import own_tokens
from megatron.lm.planning.layers import Parameter, counted, of_layers, stage_layers, stage_mixtures, stage_parameters
from megatron.lm.planning.memory import state_formats
from msamp.nn.fp8_attention import FP8_QUERIES


class Transfer(NamedTuple):
    """Collectives of one kind in one micro-batch: total bytes that a rank sends, and their number."""

    size: float
    calls: int


def tensor_parallel(config: Config, stage: int) -> dict[str, Transfer]:
    """Return the transfers per micro-batch between the tensor-parallel ranks of a stage, by kind; empty for one rank."""
    parallel = config.parallel
    if parallel.tensor_model_parallel_size == 1:
        return {}
    transfers: dict[str, Transfer] = {}
    for one, layers in counted(of_layers(config, stage_layers(config, stage))):
        for kind, transfer in _of_layers(one, layers).items():
            before = transfers.get(kind, Transfer(0.0, 0))
            transfers[kind] = Transfer(before.size + transfer.size, before.calls + transfer.calls)
    first, last = stage == 0, stage == parallel.pipeline_model_parallel_size - 1
    size, ends = _elements(config) * config.precision.recipe.compute.bytes, 2 * first + 2 * last
    if not parallel.sequence_parallel:  # all-reduces
        size, ends = 2 * size, first + last
    return transfers | ({"head and embedding": Transfer(size * ends, ends)} if ends else {})


def _elements(config: Config) -> float:
    """Return the number of elements of an activation that a rank sends in an all-gather or a reduce-scatter."""
    tp = config.parallel.tensor_model_parallel_size
    return config.tokens * config.model.hidden_size * (tp - 1) / tp


def _of_layers(config: Config, layers: int) -> dict[str, Transfer]:
    """Return the transfers of `layers` layers of one kind."""
    parallel, recipe, elements = config.parallel, config.precision.recipe, _elements(config)
    wide, gemm = recipe.compute.bytes, None if set(config.precision.bf16_linears or ()) == set(LINEARS) else recipe.gemm
    in_fp8 = recipe.fp8_wire and gemm is not None
    narrow = 1 if recipe.gathers_fp8 and gemm is not None else wide
    grad = 1 if in_fp8 else wide
    output = 1 if in_fp8 and parallel.tp_wire == "fp8" else wide
    if not parallel.sequence_parallel:  # all-reduces
        return {
            "grad_input sum": Transfer(2 * elements * grad * 2 * layers, 2 * layers),
            "output sum": Transfer(2 * elements * output * 2 * layers, 2 * layers),
        }
    again = gemm is None or (recipe.gathers_fp8 and parallel.tp_saved_input == "shard")
    return {
        "input gather": Transfer(elements * narrow * 2 * layers, 2 * layers),
        "input gather again": Transfer(elements * narrow * 2 * layers if again else 0.0, 2 * layers if again else 0),
        "grad_input sum": Transfer(elements * grad * 2 * layers, 2 * layers),
        "output sum": Transfer(elements * output * 2 * layers, 2 * layers),
        "grad_output gather": Transfer(elements * narrow * 2 * layers, 2 * layers),
    }


def context_parallel(config: Config, layers: int) -> Transfer:
    """Return the transfers per micro-batch between the context-parallel ranks, of the attention of `layers` layers: with a ring those of
    its first rank, which sends most.

    Recomputation runs forward again. A ring sends keys and values in forward and in backward, and their gradients in backward; an
    all-to-all queries, keys, values and output in forward, and their gradients in backward, with FP8 attention the output once more, the
    output's gradient in the compute dtype, and one FP32 number per head and token. A few sums per channel of all tokens are not counted. A
    fused layer keeps the queries, keys and values that an all-to-all returned, also if it recomputes its attention.
    """
    model, parallel, precision = config.model, config.parallel, config.precision
    ranks, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if ranks == 1:
        return Transfer(0.0, 0)
    wide = precision.recipe.compute.bytes
    fp8_attention = precision.attention_precision == "fp8"
    narrow = 1 if fp8_attention or parallel.cp_wire == "fp8" else wide
    forwards = 1 + (config.training.recompute_granularity == "full" or "core_attn" in config.training.recomputed_modules)
    keys = 2 * config.tokens * model.query_groups * model.head_size / tp  # and values
    if parallel.cp_comm_type == "a2a":
        queries = config.tokens * model.num_attention_heads * model.head_size / tp
        firsts = 1 if config.fuses_layers and config.training.recompute_granularity != "full" else forwards
        element = 1 if fp8_attention else wide
        outputs = firsts if fp8_attention else forwards
        forward = firsts * (queries + keys) * narrow + outputs * queries * element
        backward, back = (2 * queries + keys) * wide, 2
        if fp8_attention:
            returned = 1 if model.seq_length - int(model.objective == "causal-lm") <= FP8_QUERIES else wide
            backward = (
                queries * wide + (queries + keys) * returned + 4 * queries / model.head_size + (queries if config.fuses_layers else 0)
            )
            back = 3 + config.fuses_layers
        return Transfer(layers * (ranks - 1) / ranks * (forward + backward), layers * (firsts + outputs + back))
    hop, gradients = keys * narrow, keys * (1 if fp8_attention else wide)
    return Transfer(layers * (ranks - 1) * ((forwards + 1) * hop + gradients), layers * (ranks - 1) * (forwards + 2))


def expert_parallel(config: Config, layers: int) -> dict[str, Transfer]:
    """Return the transfers per micro-batch between the processes that share the experts of `layers` layers, by kind; empty for one process.

    Each sends its T tokens of width h to all N - 1 others, and gets the sums of their results (`msamp.parallel.expert_parallel`): T h
    elements per collective. The router's k choices per token are 8 bytes each, and the gradients of their probabilities 4. Recomputation
    sends nothing twice.
    """
    ranks, precision, wire = config.parallel.expert_model_parallel_size, config.precision, config.parallel.moe_wire
    if ranks == 1:
        return {}
    in_fp8 = bool(config.precision.fp8_experts(config.model))
    wide = precision.recipe.compute.bytes
    narrow, summed = 1 if in_fp8 and wire != "bf16" else wide, bytes_of_expert_sums(config)
    tokens = layers * (ranks - 1) * own_tokens(config)
    hidden, choices = tokens * config.model.hidden_size, tokens * config.model.moe_router_topk
    gemm = precision.recipe.gemm
    shared = 2 * (summed < wide) + 2 * (in_fp8 and gemm is not None and not gemm.input.scaling.window)
    kinds = {
        "expert tokens gather": Transfer(hidden * narrow, layers),
        "expert output sum": Transfer(hidden * summed, layers),
        "expert grad_output gather": Transfer(hidden * narrow, layers),
        "expert grad_input sum": Transfer(hidden * summed, layers),
        "expert routing": Transfer(choices * (8 + 4), 2 * layers),
    }
    # An all-reduce of an amax per cast with a just-in-time scale.
    return kinds | ({"expert amax": Transfer(shared * layers * 4 * 2 * (ranks - 1) / ranks, shared * layers)} if shared else {})


def bytes_of_expert_sums(config: Config) -> int:
    """Return the bytes per element in which the sums of experts' results return to a token's process."""
    narrow = config.parallel.moe_wire == "fp8-sums" and config.precision.fp8_experts(config.model)
    return 1 if narrow else config.precision.recipe.compute.bytes


def pipeline(config: Config, stage: int) -> Transfer:
    """Return the transfers per micro-batch to neighboring stages: per chunk an activation forward and a gradient back."""
    stages = config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return Transfer(0.0, 0)
    sends = 2 * (config.parallel.virtual_stages(config.model.num_layers) or 1) - (stage == 0) - (stage == stages - 1)
    rows, element = config.parallel.rows(config.model.seq_length), config.precision.recipe.compute.bytes
    size = rows * config.training.micro_batch_size * config.model.hidden_size * element
    return Transfer(float(sends * size), sends)


def data_parallel(config: Config, copies: int, stage: int) -> tuple[float, float]:
    """Return the bytes per step between data-parallel ranks: of gradients, and of weights gathered under ZeRO."""
    if copies == 1:
        return 0.0, 0.0
    formats, parameters = state_formats(config), stage_parameters(config, stage)
    few = config.parallel.axes(copies * config.parallel.axes(1).model).expert_data  # copies of experts that processes share

    def shared(p: Parameter) -> float:
        return p.size * (1 - 1 / (few if p.spread else copies))

    gradients = sum(shared(p) * formats[p.kind][1].grad.bytes for p in parameters) * (1 if config.shards_optimizer else 2)
    weights = sum(shared(p) * formats[p.kind][0].bytes for p in parameters) if config.shards_optimizer else 0.0
    return gradients, weights


def by_kind(config: Config, world_size: int) -> dict[str, float]:
    """Return the bytes that a rank of the busiest stage sends per step, by kind."""
    micro_batches, copies = config.num_micro_batches(world_size), config.parallel.axes(world_size).copies
    stages = []
    for stage in range(config.parallel.pipeline_model_parallel_size):
        gradients, weights = data_parallel(config, copies, stage)
        sizes = {"gradients": gradients, "weights": weights, "pipeline": micro_batches * pipeline(config, stage).size}
        sizes["keys and values"] = micro_batches * context_parallel(config, len(stage_layers(config, stage))).size
        mixtures = stage_mixtures(config, stage)
        for kind, sent in expert_parallel(mixtures[0], len(mixtures)).items() if mixtures else ():
            sizes[kind] = micro_batches * sent.size
        stages.append(sizes | {kind: micro_batches * sent.size for kind, sent in tensor_parallel(config, stage).items()})
    return max(stages, key=lambda sizes: sum(sizes.values()))
