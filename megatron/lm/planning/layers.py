"""The transformer layers of a pipeline stage, and what kind each is.

With `--first-last-layers-bf16` a model has two kinds of layers. The planner describes each by the configuration of a model that has no
other kind (`Config.of_layer`), and adds them up.
"""

from collections.abc import Iterable

from megatron.lm.config import Config


def of_layers(config: Config, layers: Iterable[int]) -> list[Config]:
    """For each of these layers the configuration of a model that has no other kind of layer, see `Config.of_layer`."""
    kinds: dict[bool, Config] = {}
    return [kinds.setdefault(plain, config.of_layer(layer)) for layer in layers for plain in [layer in config.layers_in_bf16]]


def counted(kinds: Iterable[Config]) -> list[tuple[Config, int]]:
    """The configurations of `of_layers`, each once, and how many layers have it."""
    found = list(kinds)
    return [(one, sum(other is one for other in found)) for one in {id(one): one for one in found}.values()]


def stage_layers(config: Config, stage: int) -> list[int]:
    """The transformer layers of a pipeline stage, counted from 0, chunk by chunk."""
    return [layer for chunk in stage_chunks(config, stage) for layer in chunk]


def stage_chunks(config: Config, stage: int) -> list[range]:
    """The layers of each chunk of a pipeline stage: without interleaving one, else as many as it has virtual stages."""
    stages, layers = config.parallel.pipeline_model_parallel_size, config.model.num_layers
    size = config.parallel.num_layers_per_virtual_pipeline_stage or layers // stages
    firsts = range(stage * size, layers, stages * size)
    return [range(first, first + size) for first in firsts]
