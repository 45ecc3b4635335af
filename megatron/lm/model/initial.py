"""Initial weights that depend only on the seed and the model's shape: each is drawn with a key from its name, and a rank keeps its part.

So a model starts from the same numbers on one process and on any grid of tensor and pipeline parallelism, and in any precision up to
rounding. The draws are only equal on the same kind of device, since CPU and GPU generators differ, and with the same padding of the
vocabulary, which is a multiple of `--make-vocab-size-divisible-by` x TP.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor, nn

from megatron.lm.model.linear import FP8Gemm
from megatron.lm.model.moe.layer import TrainedMatrices
from msamp.nn.expert_layer import Experts

if TYPE_CHECKING:
    from megatron.lm.config import ModelConfig

_RESIDUAL = ("linear_proj", "linear_fc2")  # each adds its output to the residual stream once per layer


@torch.no_grad()
def draw_weights(model: LanguageModule, config: "ModelConfig", seed: int) -> None:
    """Fill every matrix of this rank's part of the model from N(0, std^2), drawn in FP32.

    std is `--init-method-std`, divided by sqrt(2 x layers) in layers that write to the residual stream. Vectors keep their initial values:
    biases 0, norms 1. The padding rows of the vocabulary are drawn like the others.
    """
    std, residual_std = config.init_method_std, config.init_method_std / math.sqrt(2 * config.num_layers)
    ranks = model.pg_collection.tp
    for name, module in named_globally(model):
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            if isinstance(module, Experts):  # each has its own key, so that it does not depend on which other experts a rank has
                for number, weight in enumerate(parameter, module.first):
                    drawn = _draw(f"{name}.{key}.{number}", weight, 1, seed)
                    weight.copy_(drawn * (residual_std if key == "fc2_weight" else std))
                continue
            part = _draw(f"{name}.{key}", parameter, ranks.size(), seed)
            part *= residual_std if name.endswith(_RESIDUAL) else std
            if getattr(parameter, "tensor_model_parallel", False):
                # With SwiGLU a rank has its slice of the gate, then its slice of the other half.
                dim, strips = parameter.partition_dim, 2 if config.swiglu and name.endswith("linear_fc1") else 1  # type: ignore[attr-defined]
                part = torch.cat([strip.chunk(ranks.size(), dim)[ranks.rank()] for strip in part.chunk(strips, dim)], dim)
            if isinstance(module, FP8Gemm):
                module.start_from(part.to(parameter.dtype))
            else:
                parameter.copy_(part)


def named_globally(model: LanguageModule) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over modules with the names that they have in a model on one process."""
    offset = model.decoder.layers[0].layer_number - 1
    for name, module in model.named_modules():
        if name.startswith("decoder.layers."):
            first, second, number, *rest = name.split(".")
            yield ".".join([first, second, str(int(number) + offset), *rest]), module
        elif name == "output_layer" and model.share_embeddings_and_output_weights:
            # The last stage's copy of the tied embedding; on one process it is the embedding itself, already drawn.
            if not model.pre_process:
                yield "embedding.word_embeddings", module
        else:
            yield name, module


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Return this rank's parameters and their names in the whole model. Parameters of a wrapping module, such as a classifier head, keep
    their names there. `model` may contain several chunks of a pipeline stage."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for inner in (module for module in model.modules() if isinstance(module, LanguageModule)):
        for name, module in named_globally(inner):
            names |= {p: f"{name}.{key}" for key, p in module.named_parameters(recurse=False)}
    return names


def _draw(name: str, parameter: Tensor, ranks: int, seed: int) -> Tensor:
    """Draw FP32 standard normal values for the whole tensor that `parameter` is a part of."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= ranks  # type: ignore[attr-defined]
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest))
    return torch.empty(shape, device=parameter.device).normal_(generator=generator)


def take_initial_weights(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Return each FP8 weight that has a separate master, with its values before rounding, from which the master starts. The model releases
    the values, so a model for inference calls this too."""
    taken: list[tuple[nn.Parameter, Tensor]] = []
    for layer in model.modules():
        if isinstance(layer, TrainedMatrices):
            taken += layer.take_initial_weights()
        elif isinstance(layer, FP8Gemm) and (values := layer.take_initial_weight()) is not None:
            taken.append((layer.weight, values))
    return taken
