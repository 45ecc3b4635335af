"""Measure what saving activations in FP8 loses and saves, by granularity, on a Llama of transformers (COAT, part 2).

The model reads the beginning of a text in BF16. Each input of a norm, of SwiGLU and of a linear layer has its own rows for each
layer: saved in E4M3 with one power-of-two scale per group of 16, 32 or 64 channels, per tensor, per token, or per group of 16 tokens,
which COAT warns against at a norm's input:

- sqnr_db, underflow, saturation: of the saved values. token_db, worst_token_db: the SQNR of the median and of the worst token's channels;
  sqnr_db is dominated by the largest values.
- for what the model computes, in the rows "BF16": peak_over_rms; the shares of tokens and of channels that contain an outlier, a magnitude
  of more than 100 times the median; the share of the outliers that lie in the first token of a sequence; token_spread, the rms of the
  largest token over that of the median one; channel_spread, the same of channels, without the first tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.lm.shell.files import read_input
from msamp.kernels import ops
from msamp.nn.saved_activations import GroupedFP8, Parts, Saved
from msamp.numerics.formats import E4M3
from msamp.numerics.metrics import saturation_frac, sqnr_db, underflow_frac
from msamp.numerics.quantize import dequantize

FAR = 100  # outlier: more than so many times the median magnitude; the largest of a million normal values is 7 times it
# What a layer of a Llama saves, and the module whose first argument it is.
KEPT: Mapping[str, str] = {
    "attention norm input": "input_layernorm",
    "QKV input": "self_attn.q_proj",
    "output projection input": "self_attn.o_proj",
    "MLP norm input": "post_attention_layernorm",
    "gate and up input": "mlp.gate_proj",
    "down projection input": "mlp.down_proj",
}
SWIGLU = "SwiGLU input"


@dataclass(frozen=True)
class OneScale(Saved):
    """E4M3 with one scale per tensor, as for a linear layer's input."""

    def keep(self, x: Tensor) -> Parts:
        """Return (payload, scale_inv)."""
        return ops.cast_transpose(x, None, None, E4M3.dtype, row=True)[0::2][:2]

    def restore(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Return the dequantized values."""
        return dequantize(parts[0], parts[1], dtype)


WAYS: Mapping[str, Saved] = {f"groups of {size} channels": GroupedFP8(size=size) for size in (16, 32, 64)} | {
    "tensor": OneScale(),
    "groups of 16 tokens": GroupedFP8(axis=0),
}


def losses(x: Tensor, way: Saved) -> dict[str, Any]:
    """Return the errors of one format for `x` [tokens, channels]: see the top of this file."""
    parts = way.keep(x)
    back = way.restore(parts, x.dtype)
    wide = x.float()
    noise = (back.float() - wide).square().sum(1) / wide.square().sum(1)
    by_way = {
        "sqnr_db": sqnr_db(wide, back),
        "token_db": -10 * noise.median().log10().item(),
        "worst_token_db": -10 * noise.max().log10().item(),
        "underflow": underflow_frac(wide, back),
        "saturation": saturation_frac(parts[0], E4M3),
    }
    return {name: f"{value:.4g}" for name, value in by_way.items()}


def outliers(x: Tensor, length: int) -> dict[str, Any]:
    """Measure the outliers of `x` [tokens, channels]: see the top of this file; sequences have `length` tokens."""
    size = x.float().abs()
    far = size > FAR * size[size > 0].median()
    first = torch.arange(x.shape[0], device=x.device) % length == 0
    tokens, channels = size.square().mean(1).sqrt(), size[~first].square().mean(0).sqrt()
    columns = {
        "peak_over_rms": size.max() / size.square().mean().sqrt(),
        "outlier_tokens": far.any(1).float().mean(),
        "outlier_channels": far.any(0).float().mean(),
        "outlier_first": far[first].sum() / far.sum().clamp(min=1),
        "token_spread": tokens.max() / tokens.median(),
        "channel_spread": channels.max() / channels.median(),
    }
    return {name: f"{value.item():.4g}" for name, value in columns.items()}


def watch(model: Any, tokens: Tensor, seen: Callable[[str, int, Tensor], None]) -> None:
    """Call `seen` with each tensor that a layer of a Llama of transformers would save: (what, layer, [tokens, channels]).

    Args:
        model: its layers contain the modules of `KEPT`, and SwiGLU.
        tokens: int64 [b, s].

    Raises:
        ValueError: the model has another structure.
    """
    handles = []
    try:
        layers = list(model.model.layers)
        parts = [{what: layer.get_submodule(name) for what, name in KEPT.items()} for layer in layers]
        ups = [layer.get_submodule("mlp.up_proj") for layer in layers]
        swiglu = model.config.hidden_act == "silu"
    except AttributeError as error:
        raise ValueError(
            f"the layers of {type(model).__name__} are not those of a Llama ({error}): give a Llama, Mistral or Qwen3"
        ) from None
    if not swiglu:
        raise ValueError(f"{type(model).__name__} uses the activation {model.config.hidden_act!r}: give a model with 'silu', as in SwiGLU")
    for layer, part in enumerate(parts):
        for what, module in part.items():

            def given(_: Any, args: Any, what: str = what, layer: int = layer) -> None:
                seen(what, layer, args[0].flatten(0, 1))

            handles.append(module.register_forward_pre_hook(given))
        halves: dict[str, Tensor] = {}

        def half(name: str, layer: int = layer, halves: dict[str, Tensor] = halves) -> Callable[..., None]:
            def keep(_: Any, args: Any, output: Tensor) -> None:
                halves[name] = output.flatten(0, 1)
                if len(halves) == 2:
                    seen(SWIGLU, layer, torch.cat([halves.pop("gate"), halves.pop("up")], 1))

            return keep

        handles += [part["gate and up input"].register_forward_hook(half("gate")), ups[layer].register_forward_hook(half("up"))]
    try:
        with torch.no_grad():
            model.model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def layer_rows(model: Any, tokens: Tensor) -> list[dict[str, Any]]:
    """Return the rows of a Llama of transformers that reads `tokens` [b, s]: by layer and input, the outliers and the errors of each
    format."""
    lines: list[dict[str, Any]] = []

    def seen(what: str, layer: int, x: Tensor) -> None:
        where, whole = {"what": what, "layer": layer}, 1 << (x.shape[1] - 1).bit_length()  # the last group of a row may be shorter
        lines.append(where | {"kept": "BF16"} | outliers(x, tokens.shape[1]))
        for name, way in {**WAYS, "token": GroupedFP8(size=whole)}.items():
            lines.append(where | {"kept": name} | losses(x, way))

    watch(model, tokens, seen)
    order = [*KEPT, SWIGLU]
    return sorted(lines, key=lambda line: (line["layer"], order.index(line["what"])))


def read_model(folder: Path, text: Path, sequences: int = 4, length: int = 128) -> list[dict[str, Any]]:
    """Return the rows of the model in a folder, which reads `sequences` of `length` tokens of the text.

    Raises:
        ValueError: the text or the model's positions are too few.
    """
    from megatron.lm.post.models import check_positions, check_vocabulary, load_model, load_tokenizer

    tokenizer = load_tokenizer(folder)
    words = read_input(text, "a text in UTF-8")
    wanted = sequences * length
    for end in (16 * wanted, None):  # a large text need not be tokenized whole
        read = tokenizer(words[:end], add_special_tokens=False)["input_ids"]
        if len(read) > wanted:
            break
    if len(read) < wanted:
        raise ValueError(f"--text {text} has {len(read)} tokens, but {wanted} are needed: give a longer one")
    tokens = torch.tensor(read[:wanted]).view(sequences, length)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder, "AutoModelForCausalLM", torch.bfloat16, device).eval()
    check_positions(model, length, "length")
    check_vocabulary(model, tokenizer)
    return layer_rows(model, tokens.to(device))
