"""The transformer layers of a pipeline stage, and the kind of each.

With `--first-last-layers-bf16` a model has two kinds of layers. The planner describes each by the configuration of a model that has no
other kind (`Config.of_layer`), and adds them up.
"""

from collections.abc import Iterable

from megatron.lm.config import Config


def of_layers(config: Config, layers: Iterable[int]) -> list[Config]:
    """Return, for each of these layers, the configuration of a model that has no other kind of layer (`Config.of_layer`)."""
    kinds: dict[bool, Config] = {}
    return [kinds.setdefault(plain, config.of_layer(layer)) for layer in layers for plain in [layer in config.layers_in_bf16]]


def counted(kinds: Iterable[Config]) -> list[tuple[Config, int]]:
    """Return the distinct configurations of `of_layers`, each with the number of its layers."""
    layers = list(kinds)
    return [(one, sum(other is one for other in layers)) for one in {id(one): one for one in layers}.values()]


def stage_layers(config: Config, stage: int) -> list[int]:
    """Return the transformer layers of a pipeline stage, counted from 0, chunk by chunk."""
    return [layer for chunk in stage_chunks(config, stage) for layer in chunk]


def stage_chunks(config: Config, stage: int) -> list[range]:
    """Return the layers of each chunk of a pipeline stage, which has one chunk per virtual stage, or one without interleaving."""
    stages, layers = config.parallel.pipeline_model_parallel_size, config.model.num_layers
    size = config.parallel.num_layers_per_virtual_pipeline_stage or layers // stages
    firsts = range(stage * size, layers, stages * size)
    return [range(first, first + size) for first in firsts]
