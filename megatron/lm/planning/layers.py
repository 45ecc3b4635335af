"""The transformer layers of a pipeline stage and the kind of each, and the parameters of each rank.

With `--first-last-layers-bf16`, or experts in some of its layers, a model has several kinds of layers. The planner describes each by the
configuration of a model that has no other kind (`Config.of_layer`), and adds them up.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from megatron.lm.config import Config
from megatron.lm.config.presets import GPT2_VOCABULARY, linear_shapes
from megatron.lm.planning.experts import in_fp8, of_rank


def of_layers(config: Config, layers: Iterable[int]) -> list[Config]:
    """Return, for each of these layers, the configuration of a model that has no other kind of layer (`Config.of_layer`)."""
    kinds: dict[tuple[bool, bool], Config] = {}
    mixtures, wide = config.model.moe_layers, config.precision.layers_in_bf16(config.model.num_layers)
    return [kinds.setdefault(kind, config.of_layer(layer)) for layer in layers for kind in [(layer in wide, layer in mixtures)]]


def counted(kinds: Iterable[Config]) -> list[tuple[Config, int]]:
    """Return the distinct configurations of `of_layers`, each with the number of its layers."""
    layers = list(kinds)
    return [(one, sum(other is one for other in layers)) for one in {id(one): one for one in layers}.values()]


def stage_layers(config: Config, stage: int) -> list[int]:
    """Return the transformer layers of a pipeline stage, counted from 0, chunk by chunk."""
    return [layer for chunk in stage_chunks(config, stage) for layer in chunk]


def stage_mixtures(config: Config, stage: int) -> list[Config]:
    """Return the layers with experts of a pipeline stage, as `of_layers` does."""
    layers = stage_layers(config, stage) if config.model.num_experts is not None else []
    return [one for one in of_layers(config, layers) if one.model.moe_layers]


def stage_chunks(config: Config, stage: int) -> list[range]:
    """Return the layers of each chunk of a pipeline stage, which has one chunk per virtual stage, or one without interleaving."""
    stages, layers = config.parallel.pipeline_model_parallel_size, config.model.num_layers
    size = config.parallel.num_layers_per_virtual_pipeline_stage or layers // stages
    firsts = range(stage * size, layers, stages * size)
    return [range(first, first + size) for first in firsts]


class Parameter(NamedTuple):
    """One parameter on one rank.

    `kind`: linear, matrix (embeddings, LM head, linear layers of an FP8 recipe that stay BF16) or vector (norms, biases), as in
    `optim.parameter_groups`.
    `summed`: its gradient is also summed over other than data-parallel ranks, so it is not in a bucket with the others.
    `spread`: it belongs to experts that processes share (`--expert-model-parallel-size`), which have fewer copies.
    """

    shape: tuple[int, ...]
    kind: str
    summed: bool = False
    spread: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def vocabulary(config: Config) -> int:
    """Return the padded rows of the embedding, from `--vocab-size` or else GPT-2's (`with_vocabulary` sets it for other tokenizers)."""
    return config.padded_vocab_size(config.model.vocab_size or GPT2_VOCABULARY)


@functools.lru_cache(maxsize=64)  # times and bytes of one configuration need them several times
def stage_parameters(config: Config, stage: int) -> tuple[Parameter, ...]:
    """Return the parameters of one tensor-parallel rank of a pipeline stage, in the order of `model.parameters()`."""
    model, tp, stages = config.model, config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    hidden, last = model.hidden_size, stage == stages - 1
    embedding = Parameter((vocabulary(config) // tp, hidden), "matrix", stages > 1 and not model.untie_embeddings_and_output_weights)
    parameters = []
    if stage == 0:
        parameters.append(embedding)
        if model.position_embedding_type == "learned_absolute":
            parameters.append(Parameter((model.max_positions, hidden), "matrix"))
    for kind in of_layers(config, stage_layers(config, stage)):
        parameters += _layer(kind)
    if last:
        parameters += _norm(config)
    if last and (model.untie_embeddings_and_output_weights or stages > 1):
        parameters.append(embedding)
    return tuple(parameters)


def _layer(config: Config) -> list[Parameter]:
    """Return the parameters of one transformer layer."""
    shapes, wide = linear_shapes(config.model, config.parallel), config.precision.bf16_linears or ()

    def linear(slot: str, summed: bool = False) -> list[Parameter]:
        weight = Parameter(shapes[slot], "matrix" if slot in wide else "linear")
        bias = config.model.qkv_bias if slot == "linear_qkv" else not config.model.disable_bias_linear
        return [weight, Parameter(weight.shape[:1], "vector", summed)][: 2 if bias else 1]

    split = config.parallel.sequence_parallel  # each rank adds row-parallel biases to its slice of the sequence
    attention = linear("linear_proj", split) + linear("linear_qkv")
    summed, vectors = config.parallel.tensor_model_parallel_size > 1, 1 if config.model.normalization == "RMSNorm" else 2
    attention += [Parameter((size,), "vector", summed) for size in config.model.qk_norm_sizes or () for _ in range(vectors)]
    if config.model.moe_layers:
        return [*_norm(config), *attention, *_norm(config), *_mixture(config)]
    return [*_norm(config), *attention, *_norm(config), *linear("linear_fc1"), *linear("linear_fc2", split)]


def _mixture(config: Config) -> list[Parameter]:
    """Return the router, the experts and the shared expert of a layer. FP8 experts have a parameter per matrix, others one for all."""
    model, split, count = config.model, config.parallel.sequence_parallel, of_rank(config)
    parameters = [Parameter((model.num_experts or 0, model.hidden_size), "matrix", split)]
    spread = config.parallel.expert_model_parallel_size > 1
    for shape in (2 * model.expert_size, model.hidden_size), (model.hidden_size, model.expert_size):
        whole = Parameter(shape, "linear") if in_fp8(config) else Parameter((count, *shape), "matrix")
        parameters += [whole._replace(summed=split and not spread, spread=spread)] * (count if in_fp8(config) else 1)
    size, tp = model.moe_shared_expert_intermediate_size, config.parallel.tensor_model_parallel_size
    if size is not None:
        wide = config.precision.bf16_linears or ()
        for slot, shape in ("linear_fc1", (2 * size // tp, model.hidden_size)), ("linear_fc2", (model.hidden_size, size // tp)):
            parameters.append(Parameter(shape, "matrix" if slot in wide else "linear"))
    return parameters


def _norm(config: Config) -> list[Parameter]:
    vector = Parameter((config.model.hidden_size,), "vector", config.parallel.sequence_parallel)
    return [vector] * (1 if config.model.normalization == "RMSNorm" else 2)
