"""Memory of every process of a grid, computed from shapes for `--dry-run`, without allocating anything or creating process groups.

Parameters and model states are exact except for the scales, a few bytes per tensor. Activations are counted as in Korthikanti et al. (2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4), for the tensors that these layers save (`activation_parts`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.lm.config import LINEARS, Config
from megatron.lm.config.sections.precision import saved_activations
from megatron.lm.graphs import capture
from megatron.lm.planning import experts
from megatron.lm.planning.layers import Parameter, of_layers, stage_chunks, stage_layers, stage_parameters, vocabulary
from msamp.comm.accumulate import OWNER, Plain, accumulator
from msamp.comm.partition import plan_buckets
from msamp.nn.attention_block import AttentionBlock
from msamp.nn.fp8_attention import FP8Attention
from msamp.nn.linear_fn import LinearFunction
from msamp.nn.mlp_block import MLPBlock
from msamp.nn.saved_activations import AS_IT_IS
from msamp.nn.unfused import ActivationFunction, NormFunction
from msamp.nn.vocabulary_loss import ALL, CODES, LOGITS, chunk_rows
from msamp.numerics.formats import Format
from msamp.numerics.recipe import KINDS, StateFormats
from msamp.optim import updates
from msamp.optim.updates import MASTER, format_names

GIB = 2**30
# The CUDA context, NCCL buffers, GEMM workspaces, a gathered activation, and fragmentation of the allocator.
RESERVED = 3 * GIB


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Bytes on data-parallel rank `copy` of pipeline stage `stage`, the same on every tensor-parallel rank.

    Attributes:
        parameters: number of parameter elements.
        weight: stored weights.
        states: the optimizer's states between steps, by column: master, m, v or others that the update defines.
        gradient: the averaged gradient that the optimizer reads.
        accumulated: gradient sums over the micro-batches of a step, before averaging; 0 with one micro-batch.
        activations: tensors saved for backward of the micro-batches in flight, and the logits.
    """

    stage: int
    copy: int
    parameters: int
    weight: int
    states: dict[str, int]
    gradient: int
    accumulated: int
    activations: int

    @property
    def total(self) -> int:
        """Peak memory: averaged gradients appear, bucket by bucket, while activations and accumulated sums are freed."""
        return self.weight + sum(self.states.values()) + max(self.accumulated + self.activations, self.gradient)


def plan(config: Config, world_size: int) -> list[Rank]:
    """Return the memory of every rank of the grid, one of each tensor-parallel group; `config` must have passed `check.check`."""
    copies = config.parallel.axes(world_size).copies
    ranks = []
    for stage in range(config.parallel.pipeline_model_parallel_size):
        parameters = stage_parameters(config, stage)
        activations = stage_activations(config, stage, config.num_micro_batches(world_size))
        # In graphs of pipeline stages even a single micro-batch's gradients wait for the all-reduce after the pipeline has drained.
        sums = config.num_micro_batches(world_size) > 1 or (config.parallel.pipeline_model_parallel_size > 1 and captured(config))
        for copy, states in enumerate(_states(config, parameters, copies, sums)):
            size = sum(p.size for p in parameters)
            ranks.append(Rank(stage=stage, copy=copy, parameters=size, activations=activations, **states))
    return ranks


def state_formats(config: Config) -> dict[str, tuple[Format, StateFormats]]:
    """Return the weight format, and the formats of master, gradient and moments, by kind of parameter."""
    recipe = config.precision.recipe
    weights = {"linear": recipe.weight, "matrix": recipe.compute, "vector": recipe.compute}
    return {kind: (weights[kind], recipe.formats_of(kind)) for kind in KINDS}


def _states(config: Config, parameters: Sequence[Parameter], copies: int, accumulates: bool) -> Iterator[dict[str, Any]]:
    """Yield the bytes of each model state for each of `copies` data-parallel ranks; ValueError if the update does not support a format."""
    by_kind = state_formats(config)
    stored: dict[str, dict[str, list[Format]]] = {}  # kind of parameter -> column -> formats of the states in it
    for kind, (weight_format, formats) in by_kind.items():
        update, names = updates.by_name(formats.update), format_names(formats)
        update.check_group(names, decoupled=True)
        stored[kind] = {state.column: [] for state in update.states}
        for state in update.states:
            fmt = state.format_beside(weight_format, names)
            stored[kind][state.column] += [] if fmt is None else [fmt]
    pieces = _owned_pieces(config, parameters, copies)
    owned = pieces if config.shards_optimizer else [[(p, p.shape) for p in parameters]] * copies
    at_owner = config.precision.grad_accum == OWNER
    local = sum(p.size * accumulator_bytes(config, by_kind[p.kind][1].grad) for p in parameters if p.summed or not at_owner)
    weight = sum(p.size * by_kind[p.kind][0].bytes for p in parameters)
    for held, own in zip(owned, pieces, strict=True):
        sums = 4 * sum(math.prod(shape) for p, shape in own if not p.summed) if at_owner else 0
        states = dict.fromkeys((MASTER.column, *(column for columns in stored.values() for column in columns)), 0)
        for p, shape in held:
            for column, some in stored[p.kind].items():
                states[column] += sum(fmt.bytes_of(shape) for fmt in some)
        gradient = sum(by_kind[p.kind][1].grad.bytes_of(shape) for p, shape in held)
        yield {"weight": weight, "states": states, "gradient": gradient, "accumulated": local + sums if accumulates else 0}


def _owned_pieces(config: Config, parameters: Sequence[Parameter], copies: int) -> list[list[tuple[Parameter, tuple[int, ...]]]]:
    """Return the parameters, or parts of them, whose gradients each data-parallel rank reduces, with their shapes."""
    if any(p.spread for p in parameters):
        axes = config.parallel.axes(copies * config.parallel.axes(1).model)
        each = _owned_pieces(config, [p for p in parameters if not p.spread], copies)
        fewer = _owned_pieces(config, [p._replace(spread=False) for p in parameters if p.spread], axes.expert_data)
        return [dense + fewer[number % axes.expert_data] for number, dense in enumerate(each)]
    formats, backward = state_formats(config), list(reversed(parameters))
    buckets = [(formats[p.kind][1].grad.name, p.summed) for p in backward]
    whole = range(len(backward)) if config.precision.recipe.whole_tensors else ()
    divided = plan_buckets([p.shape for p in backward], buckets, copies, config.communication.bucket_size, whole=whole)
    pieces: list[list[tuple[Parameter, tuple[int, ...]]]] = [[] for _ in range(copies)]
    for piece in (piece for bucket in divided.buckets for piece in bucket.pieces):
        p = backward[piece.tensor]
        pieces[piece.owner].append((p, (piece.rows, *p.shape[1:])))
    return pieces


def accumulator_bytes(config: Config, grad: Format) -> int:
    """Return the bytes per element of the sum over micro-batches."""
    name = config.precision.grad_accum
    chosen = accumulator({OWNER: "fp32", "fp8-sr": "fp8"}.get(name, name), grad)  # fp8-sr: in the bytes of fp8, without random words
    return chosen.dtype.itemsize if isinstance(chosen, Plain) else grad.bytes


def layer_activations(config: Config) -> int:
    """Return the bytes that one layer saves for backward of one micro-batch on one rank: the sum of `activation_parts`."""
    return sum(activation_parts(config).values())


def activation_parts(config: Config) -> dict[str, int]:
    """Return the bytes that one layer saves for backward of one micro-batch on one rank: for norms (and linear inputs), attention and MLP.

    The fused FP8 layer (`Config.fuses_layers`) is two autograd functions, with `AttentionBlock.saved_bytes` and `MLPBlock.saved_bytes`.
    Other layers save these bytes per token, with a = 2 (4 at fp32); c = a, or 17/16 with --save-activations coat; l = 1 for the input of an
    FP8 linear layer (`Cast.element_bytes` with blocks, a without FP8); t = TP (T = t with sequence parallelism, else 1); q and k the widths
    of a rank's queries and keys; f the width of its slice of the MLP:

        norms          2 c h / T             their inputs, which are the residual stream
                       2 l h / G             the inputs of QKV and fc1; G = t if a rank keeps its shard and gathers again (BF16, and O3
                                             with --tp-saved-input shard), else 1: O1 and O2 keep the gathered input
                       2 h / T               two masks, with dropout on the residual stream
        attention      a (q + 2 k)           QKV's output after RoPE; keys and values are views of it
                       a q                   queries, if they have several groups and must be copied out of it
                       a (q + k)             with QK layernorm: queries and keys after norm and RoPE, and for each of the two
                       4 a d / b             cosines and sines, with d rotated channels per head
                       a q                   the output; no s x s matrix, which the kernels recompute
                       2 a q                 keys and values of groups, repeated, with --reset-attention-mask
                       l q with FP8          the projection's input, cast; without FP8 it is the output itself
        MLP            c f, SwiGLU 2 c f     the input of GELU or SwiGLU
                       l f                   fc2's input

    If an all-to-all of heads (`--cp-comm-type a2a`) is around attention, queries, keys, values and output are saved by heads, and the
    projection's input by tokens: a q without FP8, and l q with it, also in a fused layer.

    With core_attn recomputed, the attention output is not saved but the projection's input is. With mlp recomputed, only fc1's input is
    saved, in the compute dtype. With --attention-precision fp8, `FP8Attention.saved_bytes` replaces QKV's output, queries, keys and output;
    with QK layernorm, QKV's output and the cosines and sines remain. If such attention is recomputed, its inputs are saved in the compute
    dtype.

    Without tensor parallelism an unfused GPT saves 32 s b h in BF16 and 27 s b h with FP8, a fused one 20, with coat 14.4. Korthikanti et
    al. have 34 s b h for BF16, with three dropout masks and without the QKV output.
    """
    if config.fuses_layers and not config.model.moe_layers:
        norms, attention, mlp = _fused_layer(config)
    else:
        norms, attention, mlp = _norms_of_modules(config), _attention_of_modules(config), _mlp_of_modules(config)
    return {name: int(size * config.tokens) for name, size in (("norms", norms), ("attention", attention), ("MLP", mlp))}


def _widths(config: Config) -> tuple[float, float, float]:
    """Return a rank's width of all heads, width of all query groups, and input width of GELU or SwiGLU."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    return model.num_attention_heads / tp, model.query_groups / tp, model.ffn_size / tp * (2 if model.swiglu else 1)


def _fused_layer(config: Config) -> tuple[float, float, float]:
    """Return the bytes per token of a fused layer: norms, attention, MLP."""
    model, wide, again, split = config.model, _compute_bytes(config), config.training.recomputed_modules, _sequence_split(config)
    heads, groups, width = _widths(config)
    saved, gathered = saved_activations(config.precision), split > 1 and config.parallel.tp_saved_input == "gathered"
    attention = AttentionBlock.saved_bytes(
        model.hidden_size,
        heads,
        groups,
        model.head_size,
        wide,
        saved,
        ranks=split,
        gathered=gathered,
        recompute="core_attn" in again and not model.attention_dropout,
        fp8=config.precision.attention_precision == "fp8",
        head_norms=model.qk_layernorm,
        shared=config.parallel.shares_heads,
    )
    inner = attention.inner + (0 if "core_attn" in again else _repeated_keys(config))
    mlp = MLPBlock.saved_bytes(model.hidden_size, width, wide, saved, ranks=split, gathered=gathered, recompute="mlp" in again)
    return attention.norm + mlp.norm, inner, mlp.inner


def _repeated_keys(config: Config) -> float:
    """Return the bytes per token for keys and values repeated for their queries: memory-efficient attention, which runs with the mask of
    --reset-attention-mask, has no groups."""
    heads, groups, _ = _widths(config)
    repeats = config.data.reset_attention_mask and config.model.attention_backend == "auto" and heads > groups
    return 2 * _compute_bytes(config) * heads * config.model.head_size if repeats else 0.0


def _input_bytes(config: Config) -> tuple[float, dict[str, float]]:
    """Return the bytes per element of an FP8 input (of the compute dtype without FP8 GEMMs), and of each linear layer's input."""
    wide, gemm, in_bf16 = _compute_bytes(config), config.precision.recipe.gemm, config.precision.bf16_linears or ()
    cast = wide if gemm is None else LinearFunction.saved_bytes(1, gemm.input)
    return cast, {slot: wide if slot in in_bf16 else cast for slot in LINEARS}


def _norms_of_modules(config: Config) -> float:
    """Return the bytes per token for inputs of the norms and of the linear layers after them."""
    model, recipe, wide, split = config.model, config.precision.recipe, _compute_bytes(config), _sequence_split(config)
    cast, narrow = _input_bytes(config)
    gathered = recipe.fp8 and not (recipe.gathers_fp8 and config.parallel.tp_saved_input == "shard")
    # A router keeps its input in the compute dtype, its experts' casts are counted with them.
    fc1 = wide if "mlp" in config.training.recomputed_modules or config.model.moe_layers else narrow["linear_fc1"]
    norms = 2 * NormFunction.saved_bytes(model.hidden_size, wide, saved_activations(config.precision)) / split
    for size in (narrow["linear_qkv"], fc1):
        norms += size * model.hidden_size / (1 if gathered and size == cast else split)
    return norms + (2 * model.hidden_size / split if model.hidden_dropout else 0)


def _attention_of_modules(config: Config) -> float:
    """Return the bytes per token for queries, keys, values and output of attention, and the input of its projection."""
    model, wide, again = config.model, _compute_bytes(config), "core_attn" in config.training.recomputed_modules
    heads, groups, _ = _widths(config)
    queries, keys = heads * model.head_size, groups * model.head_size
    turned = model.qk_layernorm and model.position_embedding_type == "rope"  # rotated by megatron-core
    tables = 4 * int(model.head_size * model.rotary_percent) / config.training.micro_batch_size if turned else 0
    projected = _input_bytes(config)[1]["linear_proj"] * queries
    if config.precision.attention_precision == "fp8" and not again:
        wider = queries + 2 * keys if model.qk_layernorm else 0
        return FP8Attention.saved_bytes(heads, groups, model.head_size, output=True) + wide * (wider + tables) + projected
    in_fp8 = config.precision.recipe.gemm is not None and "linear_proj" not in (config.precision.bf16_linears or ())
    shared = config.parallel.shares_heads and not again
    rotated = (queries if 1 < groups < heads and not shared else 0) + (queries + keys if model.qk_layernorm else 0)
    output = (0 if again and in_fp8 else queries) + (queries if shared and not in_fp8 else 0)
    repeated = 0 if again else _repeated_keys(config)
    return wide * (queries + 2 * keys + rotated + tables + output) + repeated + (projected if in_fp8 else 0)


def _mlp_of_modules(config: Config) -> float:
    """Return the bytes per token for the input of GELU or SwiGLU, and the input of fc2."""
    if config.model.moe_layers and not ("mlp" in config.training.recomputed_modules and not experts.recomputes_fc1(config)):
        return experts.kept_per_token(config, _input_bytes(config)[1]["linear_fc1"])
    if "mlp" in config.training.recomputed_modules:
        return 0
    seen = ActivationFunction.saved_bytes(_widths(config)[2], _compute_bytes(config), saved_activations(config.precision))
    return seen + _input_bytes(config)[1]["linear_fc2"] * config.model.ffn_size / config.parallel.tensor_model_parallel_size


def _recomputed_at_once(config: Config) -> int:
    """Return the bytes that selective recomputation needs while backward is in a layer, for its attention or its MLP."""
    everything = replace(config, training=replace(config.training, recompute_granularity=None, recompute_modules=()))
    kept = activation_parts(config)
    return max(size - kept[name] for name, size in activation_parts(everything).items())


def stage_activations(config: Config, stage: int, micro_batches: int) -> int:
    """Return the peak bytes that a rank of a pipeline stage keeps for backward.

    1F1B has P - p micro-batches in flight on stage p of P; interleaved with V chunks per stage, 2 (P - p - 1) + (V - 1) P + 1 times a
    chunk. In CUDA graphs each of the chunks' `slots` has its own memory. Full recomputation keeps the inputs of its units and
    all activations of one unit; selective adds the recomputed part of one layer. With `--reset-attention-mask` each micro-batch in flight
    has its mask. The last stage adds the maximum of two peaks: final norm, LM head and cross entropy of one micro-batch (`_head`), and
    backward of a layer after them (`_backward_of_a_layer`).
    """
    model, training, parallel = config.model, config.training, config.parallel
    stages, chunk = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    layers, unit = model.num_layers // stages, training.recompute_num_layers or 1
    if chunk is None:
        chunk, under_way = layers, min(micro_batches, stages - stage)
    else:
        chunks = layers // chunk
        under_way = min(micro_batches * chunks, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)
    chunks_of_kinds = [of_layers(config, part) for part in stage_chunks(config, stage)]
    kinds = {id(kind): kind for part in chunks_of_kinds for kind in part}  # most models have one, however many layers they have
    kept_by = {key: layer_activations(kind) for key, kind in kinds.items()}
    fullest = max(([kept_by[id(kind)] for kind in part] for part in chunks_of_kinds), key=sum)
    stream = _compute_bytes(config) * model.hidden_size * config.tokens // _sequence_split(config)
    if training.recompute_granularity != "full":
        kept, again = sum(fullest), max(map(_recomputed_at_once, kinds.values()))
    elif training.recompute_method == "uniform":
        kept, again = -(-chunk // unit) * stream, max(sum(fullest[first : first + unit]) for first in range(0, chunk, unit))
    else:
        kept, again = unit * stream + sum(fullest[unit:]), max(fullest[:unit])
    kept += document_mask(config)
    operands = sum(experts.weights_by_columns(kind) for kind in of_layers(config, stage_layers(config, stage)) if kind.model.moe_layers)
    head = max(2 * stream + _head(config), _backward_of_a_layer(config)) if stage == stages - 1 else 0
    if stages > 1 and captured(config):
        # A slot of a stage's graphs (`megatron.lm.graphs.stage_graph`) keeps the activations, copies of input and output, and temporaries
        # of backward; a chunk has the gradients of input and output. The last chunk of the last stage has the head.
        counts, size = slots(stage, stages, layers // chunk, micro_batches), kept + again + 2 * stream
        transient = [_backward_of_a_layer(config)] * len(counts)
        transient[-1] = head or transient[-1]
        return sum(count * (size + beside) + 2 * stream for count, beside in zip(counts, transient, strict=True)) + operands
    return under_way * kept + again + head + operands


def document_mask(config: Config) -> int:
    """Return the bytes of the mask of `--reset-attention-mask`, which the layers of a micro-batch share: s x s numbers per sequence."""
    sequences, length = config.training.micro_batch_size, config.model.seq_length
    return sequences * length**2 * _compute_bytes(config) if config.data.reset_attention_mask else 0


def _head(config: Config) -> int:
    """Return the bytes of logits and of the LM head's gradients between forward and backward of one micro-batch.

    They are the FP32 gradients of the head's input, for all tokens, and of this rank's rows of its weight, plus the larger of a chunk of
    logits with the input gathered under sequence parallelism (in forward), and the same gradients in the compute dtype (in backward). One
    FP8 GEMM adds the FP8 weight and a chunk's FP8 input to forward. With all three GEMMs in FP8, the gradients of the logits, a byte each,
    and the FP8 input replace the FP32 weight gradient, and forward has FP8 weight and input in both rowwise and columnwise layouts.
    """
    tokens, wide, hidden = config.tokens, _compute_bytes(config), config.model.hidden_size
    rows = vocabulary(config) // config.parallel.tensor_model_parallel_size
    gradients = (rows + tokens) * hidden
    gathered = tokens * hidden if _sequence_split(config) > 1 else 0
    if config.precision.output_layer_precision == ALL:
        logit = wide + CODES
        chunk = chunk_rows(tokens, rows, hidden, wide, logit_bytes=logit)
        kept = (4 + 1) * tokens * hidden + tokens * rows
        return kept + max(wide * gradients, logit * chunk * rows + wide * gathered + 2 * rows * hidden + tokens * hidden)
    chunk = chunk_rows(tokens, rows, hidden, wide)
    narrow = (rows + chunk) * hidden if config.precision.output_layer_precision == LOGITS else 0
    return 4 * gradients + max(wide * gradients, wide * (chunk * rows + gathered) + narrow)


def _backward_of_a_layer(config: Config) -> int:
    """Return the peak bytes of temporaries in backward of a fused layer's MLP, or of a mixture of experts; 0 for other layers.

    Per hidden element: the gradients of the layer's output and of the residual stream (a each, as in `activation_parts`), the first also in
    E5M2 by rows and by columns. Per element of the MLP slice f: the gradient of fc2's input (a), the gradient of fc1's output in E5M2 by
    rows and by columns, fc2's input again in E4M3 by columns, and with coat the input of GELU or SwiGLU (a).
    """
    mixtures = [kind for kind in of_layers(config, range(config.model.num_layers)) if kind.model.moe_layers]
    if mixtures:
        return max(experts.backward_of_a_layer(kind, int(experts.own_tokens(kind))) for kind in mixtures)
    if not config.fuses_layers:
        return 0
    model, wide = config.model, _compute_bytes(config)
    fc1 = 2 if model.swiglu else 1
    restored = 0 if saved_activations(config.precision) == AS_IT_IS else wide * fc1
    ffn = model.ffn_size // config.parallel.tensor_model_parallel_size
    return config.tokens * ((2 * wide + 2) * model.hidden_size + (wide + 2 * fc1 + 1 + restored) * ffn)


def _compute_bytes(config: Config) -> int:
    return config.precision.named.compute.bytes


def _sequence_split(config: Config) -> int:
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1


def captured(config: Config) -> bool:
    """Return whether steps are CUDA graphs on a GPU with Triton and NCCL."""
    obstacle = capture.obstacle(config.model, config.parallel, config.precision, config.training)
    return config.training.cuda_graph != "none" and obstacle is None


def slots(stage: int, stages: int, chunks: int, micro_batches: int) -> Sequence[int]:
    """Return the maximum number of micro-batches in flight on each chunk of a pipeline stage, for which graphs reserve memory.

    This follows megatron-core's schedules: 1F1B; or interleaved 1F1B after 2 (P - p - 1) + (V - 1) P warm-up forwards, with P micro-batches
    through each chunk before the next.

    Args:
        stage: p, in 0 .. P - 1.
        stages: P.
        chunks: V, per stage.
        micro_batches: per step; a multiple of P if interleaved.
    """
    if chunks == 1:
        return [min(micro_batches, stages - stage)]
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
    under_way, most = [0] * chunks, [0] * chunks
    for number in range(min(micro_batches * chunks, ahead + 2 * stages * chunks)):  # from `ahead` on, periodic in P V forwards
        chunk = number % (stages * chunks) // stages
        under_way[chunk] += 1
        most[chunk] = max(most[chunk], under_way[chunk])
        if number >= ahead:
            under_way[chunks - 1 - (number - ahead) % (stages * chunks) // stages] -= 1
    return most
