"""Weights in FP8 E4M3 for inference, in the layout of the compressed-tensors package, which vLLM and transformers read.

The linear layers inside the transformer layers are FP8 with one scale per tensor, activations are quantized at inference (one scale per
token), everything else is BF16. `weight` is float8_e4m3fn [out, in], `weight_scale` FP32 [1] multiplies back (our scale_inv).

One of our tensors has one scale even if Hugging Face splits it into query, key and value, or gate and up: vLLM fuses the pieces again, uses
the largest of their scales and requantizes those with another one. With equal scales no bit changes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.lm.tools.convert.architectures import GPT2
from megatron.lm.tools.convert.hugging_face import unpadded
from megatron.lm.tools.convert.layouts import Rule
from msamp.numerics.formats import E4M3
from msamp.numerics.tensor import ScalingTensor


def quantization_config(architecture: str, in_bf16: Iterable[str] = ()) -> dict[str, Any]:
    """Return the section of config.json; ValueError for the architecture without an FP8 layout.

    Args:
        architecture: `model_type` of config.json.
        in_bf16: Hugging Face's names of the weights of linear layers and routers that stay in BF16.
    """
    if architecture == GPT2.model_type:
        raise ValueError(
            "a model with --position-embedding-type learned_absolute is a gpt2 of transformers, and compressed-tensors does not support "
            "its transposed weights (Conv1D): use to-hf --dtype bfloat16"
        )
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": fp8 | {"strategy": "tensor", "dynamic": False},
        "input_activations": fp8 | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        # The LM head, under transformers' and vLLM's name, and layers that were trained in BF16.
        "ignore": ["lm_head", "embed_out", *(name.removesuffix(".weight") for name in in_bf16)],
    }


def kept_in_bf16(rules: Iterable[Rule], layers: Collection[int]) -> list[str]:
    """Return Hugging Face's names of the weights of the linear layers in these transformer layers, counted from 0
    (`Config.layers_in_bf16`)."""
    prefixes = tuple(f"decoder.layers.{layer}." for layer in layers)
    return [name for rule in rules if rule.linear and rule.ours.startswith(prefixes) for name in rule.theirs]


def routers(rules: Iterable[Rule]) -> list[str]:
    """Return Hugging Face's names of the weights of the routers, which stay in BF16."""
    return [name for rule in rules if rule.ours.endswith(".router.weight") for name in rule.theirs]


def fp8_tensors(
    rules: list[Rule], values: Mapping[str, Tensor], weight: Callable[[str], Tensor], in_bf16: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face's tensors by name; one of ours is in memory at a time.

    Args:
        in_bf16: Hugging Face's names of weights that stay in BF16.
        rules: of the model.
        values: our tensors in FP32, from the best available copy.
        weight: name -> the weight as it was saved. One that is FP8 E4M3 with one scale is copied bit for bit; any other is quantized from
            `values`, with the largest power of two that fits.

    Raises:
        ValueError: a weight that is not finite.
    """
    for rule in rules:
        if not rule.linear or rule.theirs[0] in in_bf16:
            yield from zip(rule.theirs, rule.split(unpadded(rule, values[rule.ours]).bfloat16()), strict=True)
            continue
        saved = weight(rule.ours)
        if not isinstance(saved, ScalingTensor) or saved.format != E4M3:
            saved = ScalingTensor.quantize(values[rule.ours], E4M3)
        if not saved.scale_inv.isfinite():
            raise ValueError(f"{rule.ours} contains NaN or Inf: export an older checkpoint")
        # As bytes: a CPU lacks some of the operations on FP8.
        for name, part in zip(rule.theirs, rule.split(unpadded(rule, saved.payload.view(torch.uint8))), strict=True):
            yield name, part.view(torch.float8_e4m3fn)
            yield f"{name}_scale", saved.scale_inv.detach().reshape(1).clone()
