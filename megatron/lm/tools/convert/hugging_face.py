"""Convert names and tensors of our models to and from Hugging Face's: pure functions over mappings of tensors.

Exports drop the padding rows of the vocabulary. Imports set a padding row to the mean of the others. In the LM head this is the one choice
that is harmless for every model: by Jensen's inequality such a row takes at most 1 / vocabulary of the softmax's denominator, while a row
of zeros, with its logit of 0 among GPT-2's of -30 and less, would take nearly all of it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.lm.config import Config, ModelConfig, PrecisionConfig
from megatron.lm.config.cli import config_from_dict
from megatron.lm.config.rules.check import single_values
from megatron.lm.config.rules.experts import router
from megatron.lm.config.rules.shape import attention_shape
from megatron.lm.config.rules.table import conflicts
from megatron.lm.hugging_face.config_file import MOST_LAYERS
from megatron.lm.hugging_face.folder import check_finite
from megatron.lm.tools.convert.architectures import ARCHITECTURES, architecture_of
from megatron.lm.tools.convert.layouts import EMBEDDING, HEAD, Architecture, Rule

_COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts")  # transformers reads either, and 4 and 5 write different ones
_EXPERTS = re.compile(r".+\.experts\.fc[12]_weight")
LARGEST_DIVISOR = 2**16  # of the vocabulary: beyond it the padding would be the larger part of any embedding
# Parameters of --use-rope-scaling that megatron-core fixes to Llama 3.1's values.
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FIELDS = {"ffn_size": "ffn_hidden_size", "query_groups": "num_query_groups", "head_size": "kv_channels", "max_positions": "seq_length"}


def hf_config(model: ModelConfig, vocab_size: int, dtype: torch.dtype, eod: int) -> dict[str, Any]:
    """Return transformers' config.json for our model.

    Args:
        vocab_size: the tokenizer's, not padded.
        dtype: of the exported weights.
        eod: id of the token that ends a document; it also begins one.

    Raises:
        ValueError: no supported architecture can represent the model; the message names the settings.
    """
    kind = architecture_of(model)
    if model.objective != "causal-lm":
        raise ValueError(f"the model was trained with --objective {model.objective}, and no supported architecture attends to both sides")
    values: dict[str, Any] = {"model_type": kind.model_type, "architectures": [kind.class_name]}
    values |= {key: getattr(model, name) for key, name in kind.keys.items()}
    values |= {key: accepted[0] for key, accepted in kind.fixed.items()}
    values |= dict.fromkeys(kind.biases, not model.disable_bias_linear)
    if kind.top_k_normalized is not None:
        values[kind.top_k_normalized] = not model.moe_router_pre_softmax
    if kind.dense_layers is not None and kind.period is not None:
        values |= {kind.period: 1, kind.dense_layers: [n for n in range(model.num_layers) if n not in model.moe_layers]}
    values |= {"rope_scaling": scaling} if (scaling := rope_scaling(model)) is not None else {}
    values["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    return values | {"vocab_size": vocab_size, "bos_token_id": eod, "eos_token_id": eod, "torch_dtype": str(dtype).removeprefix("torch.")}


def rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Return the `rope_scaling` entry of config.json for `model`; None if it does not scale its rotary embedding.

    Raises:
        ValueError: the model uses both scaling flags, which transformers cannot represent.
    """
    factor = model.rotary_seq_len_interpolation_factor
    if not model.use_rope_scaling:
        return None if factor is None else {"rope_type": "linear", "factor": factor}
    if factor is not None:
        raise ValueError(
            "transformers scales the rotary embedding by --use-rope-scaling or by --rotary-seq-len-interpolation-factor "
            f"{factor:g}, not by both: write a checkpoint for megatron-core instead, by to-megatron"
        )
    return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA_3}


def hf_rules(model: ModelConfig, vocab_size: int, names: list[str]) -> list[Rule]:
    """Return the rules for our tensors `names`; ValueError if they do not match the configuration."""
    if model.num_layers * (model.num_experts or 1) > len(names):
        experts = "" if model.num_experts is None else f" and --num-experts {model.num_experts}"
        raise ValueError(
            f"the checkpoint's configuration has --num-layers {model.num_layers}{experts}, but {len(names)} tensors: it is damaged"
        )
    rules = list(architecture_of(model).rules(model, vocab_size))
    expected = {rule.ours for rule in rules}
    if expected != set(names):
        raise ValueError(
            f"the checkpoint does not contain the tensors of its configuration: missing {_some(expected - set(names))}, unknown "
            f"{_some(set(names) - expected)}; it is damaged or of another version"
        )
    return rules


def hf_tensors(rules: list[Rule], weights: Callable[[str], Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face's tensors by name in `dtype`; `weights` returns ours, with the vocabulary padded."""
    for rule in rules:
        x = unpadded(rule, weights(rule.ours)).to(dtype)
        check_finite(rule.ours, x)
        yield from zip(rule.theirs, rule.split(x), strict=True)


def unpadded(rule: Rule, x: Tensor) -> Tensor:
    """Return `x` without padding rows of the vocabulary; ValueError if its shape does not match `rule`."""
    part = x[: rule.shape[0]] if rule.ours in (EMBEDDING, HEAD) and x.dim() else x
    if tuple(part.shape) != rule.shape:
        raise ValueError(f"{rule.ours} has shape {tuple(x.shape)}, the configuration expects {rule.shape}: the checkpoint is damaged")
    return part


def from_hf(
    hf_config: Mapping[str, Any],
    hf_weights: Mapping[str, Tensor],
    data: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    divisible_by: int = 128,
) -> tuple[Config, int, dict[str, Tensor]]:
    """Convert a Hugging Face model to (configuration, vocabulary, our tensors with the vocabulary padded).

    BF16 tensors stay BF16, all others become FP32. Of the configuration, only the model's part and `data` are meaningful; `--finetune` does
    not read learning rate, batch and iterations.

    Args:
        hf_config: content of config.json.
        hf_weights: Hugging Face's tensors by name; read one at a time.
        data: settings of `DataConfig` that describe the tokenizer; without them NullTokenizer.
        vocab_size: the tokenizer's, if it differs from config.json; the other rows stay as padding.
        divisible_by: `--make-vocab-size-divisible-by`.

    Raises:
        ValueError: an architecture or a setting that is not supported or of another type, tensors that are missing, unknown, of another
            shape or not finite.
    """
    kind = _kind(hf_config)
    settings = _settings(kind, hf_config)
    rows = settings["vocab_size"]
    if type(rows) is not int or rows < 1:
        raise ValueError(f"config.json has vocab_size = {rows!r}: it must be the number of rows of the embedding")
    vocab_size = rows if vocab_size is None else vocab_size
    if vocab_size > rows:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, but the model's embedding has {rows} rows: give the tokenizer of this model"
        )
    tokenizer = dict(data or {"tokenizer_type": "NullTokenizer"})
    fields = _model_fields(kind, settings) | _scaling_fields(_rope(hf_config)) | {"make_vocab_size_divisible_by": divisible_by}
    if tokenizer["tokenizer_type"] == "NullTokenizer":
        fields["vocab_size"] = vocab_size
    sections = {"model": fields, "data": tokenizer, "optimizer": {"lr": 1e-4}, "training": {"micro_batch_size": 1, "train_iters": 1}}
    config = config_from_dict(sections)
    problems = list(single_values(config.model)) or [*conflicts(config, only={"model"}), *attention_shape(config, 1), *router(config, 1)]
    if problems:
        raise ValueError(f"config.json describes a model that is not supported: {'; '.join(problems)}")
    if not 1 <= divisible_by <= LARGEST_DIVISOR:
        raise ValueError(f"--make-vocab-size-divisible-by {divisible_by}: give a number from 1 to {LARGEST_DIVISOR}")
    weights = _our_tensors(kind, config.model, rows, hf_weights)
    for name in (EMBEDDING, HEAD):
        if name in weights:
            weights[name] = _padded(weights[name], vocab_size, config.padded_vocab_size(vocab_size))
    precision = "bf16" if all(x.dtype == torch.bfloat16 for x in weights.values()) else "fp32"
    model = config.model
    for name, value in (("ffn_hidden_size", "ffn_size"), ("kv_channels", "head_size"), ("moe_ffn_hidden_size", "expert_size")):
        derived = replace(model, **{name: None})  # type: ignore[arg-type]
        if getattr(derived, value) == getattr(model, value):  # a setting that equals its derived value is left out of the flags
            model = derived
    return replace(config, model=model, precision=PrecisionConfig(precision=precision)), vocab_size, _joined(weights)


def _kind(hf_config: Mapping[str, Any]) -> Architecture:
    name = hf_config.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"config.json has model_type {name!r}: supported are {', '.join(ARCHITECTURES)}")
    if hf_config.get("quantization_config"):
        raise ValueError("config.json has a quantization_config: give the model in BF16, FP16 or FP32, as it was before quantization")
    return ARCHITECTURES[name]


def _rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `rope_scaling` and `rope_parameters` in config.json."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = hf_config.get(key) or {}
        if not isinstance(part, dict):
            raise ValueError(f"config.json has {key} = {part!r}: give an object, or null")
        rope |= part
    return rope


def _settings(kind: Architecture, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with transformers' defaults, and the rotary embedding's keys as in transformers 4."""
    rope = _rope(hf_config)
    if not kind.scales_rope and _scaling_fields(rope):
        raise ValueError(f"config.json scales the rotary embedding of a {kind.model_type}: only rope_type 'default' is supported")
    of_ours = {ours: theirs for theirs, ours in kind.keys.items()}
    spelling = {"rope_theta": of_ours.get("rotary_base"), "partial_rotary_factor": of_ours.get("rotary_percent")}
    spelling |= dict.fromkeys(_COUNTS_OF_EXPERTS, of_ours.get("num_experts"))
    given = {key: value for key, value in {**hf_config, **rope}.items() if value is not None}
    counts = [given[key] for key in _COUNTS_OF_EXPERTS if key in given]
    if kind.experts and len(counts) == 2 and counts[0] != counts[1]:
        raise ValueError(f"config.json has {' = {}, '.join(_COUNTS_OF_EXPERTS)} = {{}}: keep the right one".format(*counts))
    settings = {key: default for key, (_, default) in kind.read.items()}
    settings |= {spelling.get(key) or key: value for key, value in given.items()}
    for key in kind.read:
        kind.judge(key, settings[key])
    for key, accepted in kind.fixed.items():
        if settings.get(key, accepted[0]) not in accepted:
            raise ValueError(f"config.json has {key} = {settings[key]!r}; our models support {' or '.join(repr(v) for v in accepted)}")
    if len({bool(settings[key]) for key in kind.biases}) > 1:
        raise ValueError(
            f"config.json has {', '.join(f'{k} = {settings[k]}' for k in kind.biases)}: our linear layers have either all biases or none"
        )
    return settings


def _scaling_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings for `rope_scaling` of config.json; raise a ValueError for scaling that megatron-core does not support."""
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling == "default":
        return {}
    factor = rope.get("factor")
    known = isinstance(factor, int | float) and not isinstance(factor, bool) and factor >= 1
    if scaling == "linear" and known:
        return {"rotary_seq_len_interpolation_factor": float(factor)}  # type: ignore[arg-type]
    if scaling == "llama3" and known and all(rope.get(key) == value for key, value in _LLAMA_3.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}  # type: ignore[arg-type]
    raise ValueError(
        f"config.json scales the rotary embedding ({scaling!r}, {rope}): expected 'default', 'linear' with a factor of at least 1, or "
        f"'llama3' with a factor of at least 1 and {_LLAMA_3}; train with Megatron-LM or transformers instead"
    )


def _model_fields(kind: Architecture, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelConfig except the vocabulary."""
    # Without dense layers there is one width, which our experts use unless they have a different one.
    names = _FIELDS | {"expert_size": "moe_ffn_hidden_size" if "ffn_size" in kind.keys.values() else "ffn_hidden_size"}
    fields = dict(kind.wants) | {names.get(name, name): settings[key] for key, name in kind.keys.items() if settings[key] is not None}
    if kind.top_k_normalized is not None:
        fields["moe_router_pre_softmax"] = not settings[kind.top_k_normalized]
    if kind.dense_layers is not None:
        fields["moe_layer_freq"] = _layers_with_experts(kind, settings)
    if kind.biases:
        fields["disable_bias_linear"] = not settings[kind.biases[0]]
    fields["untie_embeddings_and_output_weights"] = not settings["tie_word_embeddings"]
    groups = fields.pop("num_query_groups", None)
    if groups not in (None, fields["num_attention_heads"]):
        fields |= {"group_query_attention": True, "num_query_groups": groups}
    return fields


def _layers_with_experts(kind: Architecture, settings: Mapping[str, Any]) -> str:
    """Return `--moe-layer-freq` for config.json's period of layers with experts, and its list of layers without; ValueError for others."""
    assert kind.dense_layers is not None
    assert kind.period is not None
    layers, period, dense = settings["num_hidden_layers"], settings[kind.period], settings.get(kind.dense_layers) or []
    if not isinstance(dense, list) or any(type(n) is not int for n in dense):
        raise ValueError(f"config.json has {kind.dense_layers} = {str(dense)[:60]!r}: it must be a list of layers, counted from 0")
    if period < 1:
        raise ValueError(f"config.json has {kind.period} = {period}: it must be at least 1")
    if not 1 <= layers <= MOST_LAYERS:
        return "1"  # refused by the rules of the model
    left = set(dense)
    pattern = ["0" if n in left or (n + 1) % period else "1" for n in range(layers)]
    return f"[{','.join(pattern)}]" if "0" in pattern else "1"


def _joined(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with one tensor [E, N, K] per matrix of experts, in the order of the experts; frees the given ones on the way."""
    joined: dict[str, Tensor] = {}
    names = list(weights)
    of_matrix: dict[str, list[str]] = {}
    for name in names:
        whole, _, number = name.rpartition(".")
        if number.isdecimal() and _EXPERTS.fullmatch(whole):
            of_matrix.setdefault(whole, []).append(name)
    for name in names:
        whole = name.rpartition(".")[0]
        if whole not in of_matrix:
            joined[name] = weights.pop(name)
        elif whole not in joined:
            joined[whole] = torch.stack([weights.pop(one) for one in of_matrix[whole]])
    return joined


def _our_tensors(kind: Architecture, model: ModelConfig, rows: int, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    left, weights = set(theirs), {}
    for rule in kind.rules(model, rows):
        parts = []
        for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True):
            # Some folders omit the `model.` prefix, and older ones name the head differently.
            candidates = (name, name.partition(".")[2], "lm_head.weight" if name == kind.tops[HEAD] else name)
            stored = next((candidate for candidate in candidates if candidate in theirs), None)
            if stored is None:
                raise ValueError(f"the folder does not contain {name}, which config.json requires: it is incomplete, or of another model")
            part = theirs[stored]
            left.discard(stored)
            if tuple(part.shape) != shape or part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{stored} is {part.dtype} of shape {tuple(part.shape)}; config.json requires {shape}, in BF16, FP16 or FP32"
                )
            check_finite(stored, part)
            parts.append(part if part.dtype == torch.bfloat16 else part.float())
        weights[rule.ours] = rule.join(parts)
    left = {name for name in left if not re.search(f"(?:{kind.ignored})$", name)}
    for name in left & {kind.tops[HEAD], "lm_head.weight"}:  # a tied head that is stored a second time
        if HEAD not in weights and torch.equal(theirs[name].to(weights[EMBEDDING].dtype), weights[EMBEDDING]):
            left.remove(name)
    if left:
        raise ValueError(f"the folder contains tensors that a {kind.model_type} of this config.json does not have: {_some(left)}")
    return weights


def _padded(x: Tensor, vocab_size: int, rows: int) -> Tensor:
    """Pad or cut x [any rows, h] to [rows, h]; each added row is the mean of the vocabulary's rows."""
    mean = x[:vocab_size].mean(0, keepdim=True, dtype=torch.float32).to(x.dtype)
    return torch.cat([x[:rows], mean.expand(max(0, rows - x.shape[0]), -1)])


def _some(names: set[str]) -> str:
    """Return the first few of `names` as text."""
    shown = sorted(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
