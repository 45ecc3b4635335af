"""Predict the time of a step, by kind, from shapes and measured rates.

The time of a micro-batch on a stage is the sum of GEMMs, attention, element-wise kernels, launch gaps and the exposed part of the
tensor-parallel collectives. In eager steps it is at least the time that the host needs for its launches. Stages run 1F1B; interleaving with
V chunks divides the bubble by V (Narayanan et al., 2021, section 2.2). A step adds the update, and the part of the communication of
gradients and weights that backward and forward of one micro-batch do not hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.lm.config import LINEARS, Config, PrecisionConfig
from megatron.lm.config.presets import linear_shapes
from megatron.lm.planning import expert_time, experts, wire
from megatron.lm.planning.layers import Parameter, counted, of_layers, stage_layers, stage_mixtures, stage_parameters, vocabulary
from megatron.lm.planning.memory import Rank, accumulator_bytes, captured, layer_activations, state_formats
from megatron.lm.planning.rates import Cluster, Rates
from msamp.nn.vocabulary_loss import ALL

BACKWARD = 2 / 3  # share of backward in the time of forward and backward


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """A predicted step: `seconds` by kind, whose sum is `total`; `captured`: whether it is a CUDA graph."""

    seconds: dict[str, float]
    captured: bool

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(self.seconds.values())


class _Stage(NamedTuple):
    """Seconds of one micro-batch on one stage: GPU time by kind, with exposed collectives only, and the host's launch time."""

    kinds: dict[str, float]
    host: float

    @property
    def device(self) -> float:
        return sum(self.kinds.values())

    @property
    def seconds(self) -> float:
        return max(self.device, self.host)


def predict(config: Config, cluster: Cluster, rates: Rates, ranks: list[Rank]) -> PredictedStep:
    """Predict the time of a step.

    Args:
        config: must have passed `check`.
        ranks: from `megatron.lm.planning.memory.plan` for this configuration and cluster.

    Raises:
        ValueError: if there is no GEMM rate for the precision.
    """
    if config.precision.recipe.compute.bytes > 2:
        raise ValueError(f"--precision {config.precision.name} uses FP32 GEMMs, which have no measured rate: choose a 16-bit or FP8 one")
    if (unknown := expert_time.refusal(config)) is not None:
        raise ValueError(unknown)
    graph, pp = captured(config), config.parallel.pipeline_model_parallel_size
    stages = [_stage(config, cluster, rates, stage, graph=graph) for stage in range(pp)]
    micro_batches, chunks = config.num_micro_batches(cluster.gpus), config.parallel.virtual_stages(config.model.num_layers) or 1
    slowest = max(stages, key=lambda stage: stage.seconds)
    bubble = (sum(stage.seconds for stage in stages) - slowest.seconds) / chunks
    seconds = {kind: micro_batches * value for kind, value in slowest.kinds.items()}
    seconds["host"] = micro_batches * (slowest.seconds - slowest.device)
    seconds["bubble"] = bubble
    update, exchange = 0.0, 0.0
    for number, stage in enumerate(stages):
        gradients, averaged = _updated(config, cluster, number)
        update = max(update, *(_update(config, rates, rank, gradients, averaged) for rank in ranks if rank.stage == number))
        exchange = max(exchange, _exchange(config, cluster, number, averaged, stage.seconds, graph=graph))
    seconds["weights"] += max(sum(expert_time.casts_of_weights(one, rates) for one in stage_mixtures(config, stage)) for stage in range(pp))
    seconds |= {"update": update, "data-parallel, exposed": exchange}
    return PredictedStep(seconds={kind: value for kind, value in seconds.items() if value > 0}, captured=graph)


def _stage(config: Config, cluster: Cluster, rates: Rates, stage: int, *, graph: bool) -> _Stage:
    pp = config.parallel.pipeline_model_parallel_size
    layers, last = config.model.num_layers // pp, stage == pp - 1
    kinds: dict[str, float] = {}
    host = 0.0
    for one, count in counted(of_layers(config, stage_layers(config, stage))):
        layer, forward = _layer(one, rates)
        again = _recomputed_share(one)
        for kind, value in layer.items():
            kinds[kind] = kinds.get(kind, 0.0) + count * (value + again.get(kind, 0.0) * forward.get(kind, 0.0))
        in_fp8 = one.precision.recipe.gemm is not None and set(one.precision.bf16_linears or ()) != set(LINEARS)
        host += count * rates("host fused" if one.fuses_layers else "host fp8" if in_fp8 else "host bf16")
    kinds["weights"] = _weights(config, cluster, rates, stage)
    kinds["gaps"] = layers * rates("gap")
    if last:
        for kind, value in _head(config, rates).items():
            kinds[kind] = kinds.get(kind, 0.0) + value
    sent = wire.tensor_parallel(config, stage).values()
    tensor = sum(one.size / cluster.link + one.calls * cluster.latency for one in sent)
    # Layers that are not fused wait for each collective: steps of O0 on two and four GPUs show 0.9 to 1.03 of all this time as exposed. In
    # FP8 that was not measured, as the kind says.
    share = rates("tp exposed, copies" if cluster.copies(config) else "tp exposed") if config.fuses_layers else 1.0
    how = "exposed" if config.fuses_layers or config.precision.recipe.gemm is None else "assumed exposed"
    kinds[f"tensor-parallel, {how}"] = tensor * share
    # Of an all-to-all everything is exposed; of a ring what takes longer than the attention meanwhile, which covers all its steps but one.
    # No rate was fitted to it.
    axes, swapped = config.parallel.axes(cluster.gpus), wire.context_parallel(config, layers)
    seconds = swapped.size / cluster.link_between(axes.tensor * axes.context) + swapped.calls * cluster.latency
    covered = 0.0 if config.parallel.cp_comm_type == "a2a" else kinds["attention"] * (axes.context - 1) / axes.context
    kinds["context-parallel, exposed"] = max(0.0, seconds - covered)
    if mixtures := stage_mixtures(config, stage):
        kinds["expert-parallel, exposed"] = expert_time.exchange(mixtures[0], cluster, len(mixtures))
    # On a pipeline stage the sends of a micro-batch are between its kernels.
    across = wire.pipeline(config, stage)
    link = cluster.network if cluster.crosses_hosts(config) else cluster.link
    kinds["pipeline sends"] = across.size / link + across.calls * cluster.latency
    more = 4 / 3 if config.training.recompute_granularity == "full" else 1.0
    return _Stage(kinds, 0.0 if graph else host * more)


def _layer(config: Config, rates: Rates) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of one layer by kind, and of its forward."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    tokens = config.tokens
    gemm, width = config.precision.recipe.gemm, model.hidden_size / tp
    bf16 = config.precision.bf16_linears or ()
    linear = 0.0
    for slot, (outputs, inputs) in expert_time.linears(config).items():
        rate = "bf16 gemm" if gemm is None or slot in bf16 else "fp8 gemm" if gemm.tensorwise else "block gemm"
        linear += 6 * tokens * outputs * inputs / rates(rate, model.hidden_size if rate == "bf16 gemm" else width)
    queries = model.num_attention_heads * model.head_size / tp
    # FP8 attention has no separate rate; BF16's time is an upper bound.
    core = "attention flash" if config.training.deterministic or model.attention_backend == "flash" else "attention"
    attention = 7 * tokens * model.seq_length * queries / rates(core, model.seq_length)
    elements = _fused_elements(config, rates) if config.fuses_layers else _unfused_bytes(config) * rates("unfused byte")
    elements += _just_in_time(config, rates)
    whole = {"linear": linear, "attention": attention, "element-wise": elements}
    share = {"linear": 1 / 3, "attention": rates("attention forward"), "element-wise": 1 / 3}
    forward = {kind: share[kind] * value for kind, value in whole.items()}
    return whole | ({"experts": expert_time.of_a_layer(config, rates)} if model.moe_layers else {}), forward


def _recomputed_share(config: Config) -> dict[str, float]:
    """Return the fraction of a layer's forward that backward recomputes, by kind."""
    training, model = config.training, config.model
    if training.recompute_granularity == "full":
        unit, stage = training.recompute_num_layers or 1, model.num_layers // config.parallel.pipeline_model_parallel_size
        share = 1.0 if training.recompute_method == "uniform" else unit / stage
        return {"linear": share, "attention": share, "element-wise": share}
    if training.recompute_granularity is None:
        return {}
    modules, shapes = training.recomputed_modules, linear_shapes(config.model, config.parallel)
    sizes = {slot: outputs * inputs for slot, (outputs, inputs) in shapes.items()}
    mlp = sizes["linear_fc1"] + (0 if config.fuses_layers else sizes["linear_fc2"])
    shares = {"attention": 1.0} if "core_attn" in modules else {}
    # Of experts only FC1 is recomputed in graphs: `expert_time.of_a_layer` has its time.
    return shares | ({"linear": mlp / sum(sizes.values())} if "mlp" in modules and not model.moe_layers else {})


def _fused_elements(config: Config, rates: Rates) -> float:
    """Return the seconds of element-wise kernels of a fused FP8 layer."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    tokens = config.tokens
    split = tp if config.parallel.sequence_parallel else 1
    channels = (model.num_attention_heads + 2 * model.query_groups) * model.head_size / tp
    hidden, ffn = tokens * model.hidden_size, tokens * model.ffn_size / tp
    seconds = 2 * hidden / split * rates("norm") + ffn * rates("swiglu" if model.swiglu else "gelu")  # squared ReLU moves GELU's bytes
    if model.position_embedding_type == "rope":
        seconds += tokens * channels * rates("rotary")
    if model.qk_layernorm:  # norms of queries and keys, and a cast of QKV's gradient that the rotary embedding's backward otherwise does
        normed = channels - model.query_groups * model.head_size / tp
        seconds += tokens * (normed * rates("norm") + channels * rates("cast"))
    # With tensor parallelism every rank gathers, casts and sums whole rows.
    seconds += hidden * (rates("rest of a layer") if tp == 1 else rates("rest of a layer, tp"))
    if config.precision.kept_activations != "compute":
        seconds += (2 * hidden / split + ffn * (2 if model.swiglu else 1)) * rates("groups of activations")
    return seconds


def _unfused_bytes(config: Config) -> float:
    """Return the bytes that an unfused layer saves for backward in BF16 without recomputation, for which the time per byte was measured."""
    training = replace(config.training, recompute_granularity=None, recompute_modules=())
    everything = replace(config, precision=PrecisionConfig(precision="bf16"), training=training)
    rows = experts.kept_by_rows(everything) * experts.own_tokens(config) if config.model.moe_layers else 0.0  # in `expert_time`
    return layer_activations(everything) - rows


def _just_in_time(config: Config, rates: Rates) -> float:
    """Return the seconds of unfused operand casts: all casts in an unfused layer, and with just-in-time scaling also the amaxes."""
    gemm = config.precision.recipe.gemm
    if gemm is None:
        return 0.0
    bf16 = config.precision.bf16_linears or ()
    cast = config.tokens * sum(outputs + inputs for slot, (outputs, inputs) in expert_time.linears(config).items() if slot not in bf16)
    per_element = 0.0 if config.fuses_layers else rates("cast") if gemm.tensorwise else rates("block cast")
    return cast * (per_element + (rates("just in time") if gemm.tensorwise and not gemm.input.scaling.window else 0.0))


def _weights(config: Config, cluster: Cluster, rates: Rates, stage: int) -> float:
    """Return the seconds per micro-batch to cast and transpose weights, and to pack or accumulate their gradients."""
    recipe, parameters = config.precision.recipe, stage_parameters(config, stage)
    linear = sum(p.size for p in parameters if p.kind == "linear")
    micro_batches = config.num_micro_batches(cluster.gpus)
    seconds = 0.0
    if recipe.gemm is not None:
        cast = linear - sum(map(expert_time.weights, stage_mixtures(config, stage)))
        seconds += cast * rates("transpose of a weight")
        if recipe.weight.bytes > 1:
            seconds += cast * rates("cast of a weight")
    if recipe.fp8_gradients:
        seconds += linear * rates("pack of a gradient") / micro_batches
    if micro_batches > 1:
        seconds += _accumulation(config, parameters, micro_batches, rates)
    return seconds


def _accumulation(config: Config, parameters: Sequence[Parameter], micro_batches: int, rates: Rates) -> float:
    """Return the mean seconds per micro-batch to add each parameter's gradient to its sum, in launches of its own. The first gradient is
    the sum, or is cast to its format. Sums in FP8 are computed twice, for their scale and to store them, but for the last."""
    wide, seconds = config.precision.recipe.compute.bytes, {}
    for kind, (_, formats) in state_formats(config).items():
        kept = accumulator_bytes(config, formats.grad)
        if kept < wide:
            moved, launches = (2 * wide + kept) * 2 + (2 * wide + 3 * kept) * (micro_batches - 2), 2 * micro_batches - 1
        else:
            moved, launches = (wide + 2 * kept) * (micro_batches - 1) + (wide + kept if kept != wide else 0), micro_batches - 1
        seconds[kind] = moved / rates("copy"), launches * rates("launch")
    return sum(p.size * seconds[p.kind][0] + seconds[p.kind][1] for p in parameters) / micro_batches


def _head(config: Config, rates: Rates) -> dict[str, float]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    tokens, rows = config.tokens, vocabulary(config) / tp
    # One FP8 GEMM of three has no separate rate: it saves little more than its casts take.
    whole = config.precision.output_layer_precision == ALL
    gemm = 6 * tokens * rows * model.hidden_size / rates("fp8 gemm" if whole else "bf16 gemm", model.hidden_size)
    if whole:
        gemm += rows * model.hidden_size * (rates("cast") + rates("just in time")) + tokens * rows * (rates("cast") + 2 / rates("copy"))
    return {"LM head": gemm, "loss": tokens * rows * rates("loss" if tp == 1 else "loss, tp")}


def _updated(config: Config, cluster: Cluster, stage: int) -> tuple[int, int]:
    """Return the bytes of all gradients of a stage on one rank, and the number of elements that it averages with other ranks."""
    parameters, formats, axes = stage_parameters(config, stage), state_formats(config), config.parallel.axes(cluster.gpus)
    gradients = sum(p.size * formats[p.kind][1].grad.bytes for p in parameters)
    return gradients, sum(p.size for p in parameters if (axes.expert_data if p.spread else axes.copies) > 1)


def _update(config: Config, rates: Rates, rank: Rank, gradients: int, averaged: int) -> float:
    """Return the seconds of the optimizer's step on a rank: read and write states, read gradients twice (once for the norm), write
    weights. `gradients` and `averaged` as `_updated` returns them."""
    owned = rank.gradient / max(1, gradients) if config.shards_optimizer else 1.0
    states, master = sum(rank.states.values()), rank.states.get("master", 0)
    weight = rank.weight * owned * (1 if 4 * master > rank.weight * owned else 2)
    seconds = (2 * states + weight + 2 * rank.gradient) / rates("update")
    if config.precision.recipe.states.m.group:
        seconds += rank.parameters * owned * rates("update of groups")
    return seconds + averaged * rates("data parallel")


def _exchange(config: Config, cluster: Cluster, stage: int, averaged: int, micro_batch: float, *, graph: bool) -> float:
    """Return the exposed seconds of communicating the gradients of `averaged` elements, and the weights. Graphs of pipeline stages, and of
    micro-batches alone, start after all weights were gathered."""
    copies = config.parallel.axes(cluster.gpus).copies
    gradients, weights = wire.data_parallel(config, copies, stage)
    if copies == 1:
        return 0.0
    waits = cluster.latency * max(1, round(averaged / config.communication.bucket_size))
    hidden = micro_batch * BACKWARD if config.communication.overlap_grad_reduce else 0.0
    if graph and config.parallel.pipeline_model_parallel_size > 1:  # after its last backward, while earlier stages still run theirs
        hidden = stage * micro_batch * BACKWARD
    seconds = max(0.0, cluster.exchange_seconds(gradients, config) + waits - hidden)
    if weights:
        waits_for_all = graph and (config.parallel.pipeline_model_parallel_size > 1 or config.training.cuda_graph == "micro-batch")
        hidden = micro_batch * (1 - BACKWARD) if config.communication.overlap_param_gather and not waits_for_all else 0.0
        seconds += max(0.0, cluster.exchange_seconds(weights, config) + waits - hidden)
    return seconds
