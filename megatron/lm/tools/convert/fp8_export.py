"""Weights in FP8 E4M3 for inference, in three layouts that servers and transformers read.

| layout | format | scales of a weight [N, K] | activations at inference |
| --- | --- | --- | --- |
| tensor | compressed-tensors | `weight_scale` [1] | one scale per token |
| block | compressed-tensors | `weight_scale` [N / 128, K / 128] | one scale per token and 128 channels |
| deepseek | DeepSeek-V3's | `weight_scale_inv` [N / 128, K / 128] | one scale per token and 128 channels |

The linear layers inside the transformer layers are quantized, everything else is BF16. `weight` is float8_e4m3fn [out, in]; its FP32 scales
multiply back (our scale_inv). A block's scale is amax / 448 [DeepSeek-V3, section 3.3.2]; in `block` the next BF16 number above it, since
compressed-tensors rounds scales to BF16 when it loads a model in BF16, and with the codes of another scale values would be wrong.

A weight that training stored in E4M3 with one scale is copied bit for bit into each layout: the model was trained with these values, and a
second rounding would change them. Its blocks all have that scale.

With one scale, Hugging Face's parts of our tensor (query, key and value, or gate and up) share it: vLLM fuses the parts again, uses the
largest of their scales and requantizes those with another one. With equal scales no bit changes. Blocks do not cross from part to part.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron.lm.tools.convert.architectures import GPT2
from megatron.lm.tools.convert.hugging_face import unpadded
from megatron.lm.tools.convert.layouts import Rule
from msamp.numerics.block_scale import block_scale, quantize_blocks
from msamp.numerics.formats import E4M3
from msamp.numerics.granularity import Block
from msamp.numerics.quantize import quantize
from msamp.numerics.tensor import ScalingTensor

FP8Layout = Literal["tensor", "block", "deepseek"]
LAYOUTS: tuple[FP8Layout, ...] = get_args(FP8Layout)
_SIDE = 128
_BLOCK = Block(_SIDE, _SIDE)


def quantization_config(architecture: str, in_bf16: Iterable[str] = (), layout: FP8Layout = "tensor") -> dict[str, Any]:
    """Return the section of config.json; ValueError for the architecture without an FP8 layout.

    Args:
        architecture: `model_type` of config.json.
        in_bf16: Hugging Face's names of the weights of linear layers and routers that stay in BF16.
    """
    if architecture == GPT2.model_type:
        raise ValueError(
            "a model with --position-embedding-type learned_absolute is a gpt2 of transformers, and no FP8 layout supports its transposed "
            "weights (Conv1D): use to-hf --dtype bfloat16"
        )
    # The LM head, under transformers' and vLLM's name, and layers that were trained in BF16.
    ignored = ["lm_head", "embed_out", *(name.removesuffix(".weight") for name in in_bf16)]
    if layout == "deepseek":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_SIDE, _SIDE],
            "modules_to_not_convert": ignored,
        }
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights: dict[str, Any] = {"strategy": "tensor"}
    activations: dict[str, Any] = {"strategy": "token"}
    if layout == "block":
        weights = {"strategy": "block", "block_structure": [_SIDE, _SIDE]}
        activations = {"strategy": "group", "group_size": _SIDE}
    group = {
        "targets": ["Linear"],
        "weights": fp8 | weights | {"dynamic": False},
        "input_activations": fp8 | activations | {"dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def _is_fp8(rule: Rule, in_bf16: Collection[str]) -> bool:
    return rule.linear and rule.theirs[0] not in in_bf16


def check_blocks(rules: Iterable[Rule], in_bf16: Collection[str]) -> None:
    """Raise a ValueError for a weight that 128 x 128 blocks do not divide.

    transformers and vLLM infer the size of a block from weight and scales, so a last block that is smaller would be read wrongly. A weight
    of fewer than 128 rows or columns has one block there.
    """
    for rule in rules:
        if not _is_fp8(rule, in_bf16):
            continue
        for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True):
            if any(size > _SIDE and size % _SIDE for size in shape):
                raise ValueError(
                    f"{name} is {' x '.join(map(str, shape))}, which blocks of {_SIDE} x {_SIDE} do not divide, and readers would take the "
                    "scales for other blocks' scales: use --layout tensor"
                )


def kept_in_bf16(rules: Iterable[Rule], layers: Collection[int]) -> list[str]:
    """Return Hugging Face's names of the weights of the linear layers in these transformer layers, counted from 0
    (`PrecisionConfig.layers_in_bf16`)."""
    prefixes = tuple(f"decoder.layers.{layer}." for layer in layers)
    return [name for rule in rules if rule.linear and rule.ours.startswith(prefixes) for name in rule.theirs]


def routers(rules: Iterable[Rule]) -> list[str]:
    """Return Hugging Face's names of the weights of the routers, which stay in BF16."""
    return [name for rule in rules if rule.ours.endswith(".router.weight") for name in rule.theirs]


def fp8_tensors(
    rules: list[Rule],
    values: Callable[[str], Tensor],
    weight: Callable[[str], Tensor],
    in_bf16: Collection[str] = (),
    layout: FP8Layout = "tensor",
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face's tensors by name; one of ours is in memory at a time.

    Args:
        in_bf16: Hugging Face's names of weights that stay in BF16.
        rules: of the model.
        values: name -> our tensor in FP32, from the best available copy.
        weight: name -> the weight as it was saved. One that is FP8 E4M3 with one scale is copied bit for bit; any other is quantized from
            `values`, with the largest power of two that fits or, for blocks, with amax / 448.
        layout: blocks require weights that `check_blocks` accepts.

    Raises:
        ValueError: a weight that is not finite.
    """
    for rule in rules:
        if not _is_fp8(rule, in_bf16):
            yield from zip(rule.theirs, rule.split(unpadded(rule, values(rule.ours)).bfloat16()), strict=True)
            continue
        saved = weight(rule.ours)
        parts = _with_one_scale(rule, values, saved) if layout == "tensor" else _with_blocks(rule, values, saved, layout == "block")
        suffix = "_scale_inv" if layout == "deepseek" else "_scale"
        for name, (payload, scale_inv) in zip(rule.theirs, parts, strict=True):
            if not scale_inv.isfinite().all():
                raise ValueError(f"{rule.ours} contains NaN or Inf: export an older checkpoint")
            yield name, payload
            yield f"{name}{suffix}", scale_inv


def _is_e4m3(saved: Tensor) -> bool:
    return isinstance(saved, ScalingTensor) and saved.format == E4M3


def _with_one_scale(rule: Rule, values: Callable[[str], Tensor], saved: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(E4M3 payload, FP32 scale_inv [1]) of each of their parts; all have the same scale."""
    whole = saved if _is_e4m3(saved) else ScalingTensor.quantize(values(rule.ours), E4M3)
    assert isinstance(whole, ScalingTensor)
    # As bytes: a CPU lacks some of the operations on FP8.
    parts = rule.split(unpadded(rule, whole.payload.view(torch.uint8)))
    return [(part.view(torch.float8_e4m3fn), whole.scale_inv.detach().reshape(1).clone()) for part in parts]


def _with_blocks(rule: Rule, values: Callable[[str], Tensor], saved: Tensor, in_bf16: bool) -> list[tuple[Tensor, Tensor]]:
    """(E4M3 payload, FP32 scale_inv of its 128 x 128 blocks) of each of their parts; `in_bf16`: scales that BF16 holds."""
    if _is_e4m3(saved):
        parts = _with_one_scale(rule, values, saved)
        return [(payload, scale_inv.expand(_BLOCK.scales_shape(payload.shape)).contiguous()) for payload, scale_inv in parts]
    blocks = []
    for part in rule.split(unpadded(rule, values(rule.ours))):
        payload, scale_inv = quantize_blocks(part, _BLOCK, E4M3, "fp32")
        if in_bf16:
            scale_inv = ((scale_inv.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)  # up, so that nothing saturates
            payload = quantize(part, _BLOCK.spread(block_scale(scale_inv), part.shape), E4M3)
        blocks.append((payload, scale_inv))
    return blocks
