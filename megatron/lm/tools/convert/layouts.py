"""How the tensors of an architecture of Hugging Face correspond to ours: names, layouts, and which settings of our model it supports.

megatron-core's `linear_qkv` contains, for each query group, its query heads, then key, then value, and its `linear_fc1` under SwiGLU is
[gate; up]. An expert's `fc1_weight` is too. Each expert's matrix is a separate tensor here, as in FP8 checkpoints.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.lm.config import ModelConfig, flag

EMBEDDING, POSITIONS, HEAD = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight"
LARGEST_TENSOR = 2**45  # elements
LARGEST = 2**31  # no setting reaches it: a larger size means a damaged file
Read = tuple[str | None, Any]


@dataclass(frozen=True)
class Layout:
    """How one of our tensors is laid out as one or more of theirs; both directions only move elements.

    split: (model, our tensor) -> their tensors. join: (model, their tensors) -> our tensor. Any dtype.
    """

    split: Callable[[ModelConfig, Tensor], list[Tensor]]
    join: Callable[[ModelConfig, list[Tensor]], Tensor]


def _split_qkv(model: ModelConfig, x: Tensor) -> list[Tensor]:
    queries = model.num_attention_heads // model.query_groups
    rows = x.unflatten(0, (model.query_groups, queries + 2, model.head_size))
    return [part.flatten(0, 2) for part in rows.split([queries, 1, 1], dim=1)]


def _join_qkv(model: ModelConfig, parts: list[Tensor]) -> Tensor:
    return torch.cat([part.unflatten(0, (model.query_groups, -1, model.head_size)) for part in parts], dim=1).flatten(0, 2)


SAME = Layout(lambda model, x: [x], lambda model, parts: parts[0])
TRANSPOSED = Layout(lambda model, x: [x.t()], lambda model, parts: parts[0].t())  # transformers' Conv1D is [in, out]; `t` leaves vectors
HALVES = Layout(lambda model, x: list(x.chunk(2)), lambda model, parts: torch.cat(parts))
QKV = Layout(_split_qkv, _join_qkv)
STACKED_QKV = Layout(
    lambda model, x: [torch.cat(_split_qkv(model, x)).t()], lambda model, parts: _join_qkv(model, list(parts[0].t().chunk(3)))
)


@dataclass(frozen=True)
class Rule:
    """One of our tensors and its counterparts.

    Attributes:
        ours: its name in the state dict of a model on one process.
        shape: its shape, the vocabulary not padded.
        theirs: names of its counterparts.
        linear: whether it is the weight of a linear layer inside a transformer layer, which FP8 inference quantizes.
    """

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    layout: Layout
    model: ModelConfig
    linear: bool = False

    def split(self, x: Tensor) -> list[Tensor]:
        """Our tensor -> theirs, contiguous."""
        return [part.contiguous() for part in self.layout.split(self.model, x)]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Their tensors -> ours, contiguous."""
        return self.layout.join(self.model, parts).contiguous()

    def their_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of its counterparts; ValueError if no memory could hold the tensor."""
        if math.prod(self.shape) > LARGEST_TENSOR:
            raise ValueError(f"{', '.join(self.theirs)} would be {' x '.join(map(str, self.shape))}: config.json is damaged")
        return [tuple(part.shape) for part in self.split(torch.empty(self.shape, device="meta"))]


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of transformers.

    Attributes:
        class_name: for "architectures" in config.json.
        wants: settings that our model must have.
        read: key of config.json -> field or property of ModelConfig with the same value, or None, and transformers' default if the key is
            missing; a default of None is derived from other keys.
        fixed: key of config.json -> values with which it computes the same as our model; the first one is written.
        layers: prefix of a layer's tensors, with a placeholder for the layer's number.
        modules: our module in a layer -> their modules and the layout.
        tops: our tensor outside the layers -> their name.
        ignored: regular expression of tensors that are not weights (masks, frequencies).
        grouped: whether it supports query groups.
        any_width: whether it supports heads of any width.
        biases: keys for whether its linear layers have biases; all equal in our models.
        scales_rope: whether `rope_scaling` in config.json may scale the rotary embedding.
        router: their module of a layer with experts.
        experts: matrix of our experts -> the modules of theirs, with {} for an expert's number, and the layout; empty without experts.
        top_k_normalized: key for whether a token's probabilities are divided by their sum; None if they always are.
        dense_layers: key for the list of layers without experts; None if every layer has them.
        period: key for N if only every Nth layer, from the Nth, has experts.
    """

    model_type: str
    class_name: str
    wants: Mapping[str, Any]
    read: Mapping[str, Read]
    fixed: Mapping[str, tuple[Any, ...]]
    layers: str
    modules: Mapping[str, tuple[tuple[str, ...], Layout]]
    tops: Mapping[str, str]
    ignored: str
    grouped: bool = False
    any_width: bool = False
    biases: tuple[str, ...] = ()
    scales_rope: bool = False
    router: str = ""
    experts: Mapping[str, tuple[tuple[str, ...], Layout]] = field(default_factory=dict)
    top_k_normalized: str | None = None
    dense_layers: str | None = None
    period: str | None = None

    @property
    def keys(self) -> dict[str, str]:
        """Key of config.json -> field or property of ModelConfig with the same value."""
        return {key: ours for key, (ours, _) in self.read.items() if ours is not None}

    def judge(self, key: str, value: Any) -> None:
        """Raise a ValueError if a value of config.json does not have the type of `key`."""
        _, default = self.read[key]
        if value is None and default is None:
            return
        expected = int if default is None else type(default)
        whole = type(value) is expected or (expected is float and type(value) is int)
        if not whole or (expected in (int, float) and not abs(value) < LARGEST):
            names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
            raise ValueError(f"config.json has {key} = {str(value)[:60]!r}: it must be {names[expected]}")

    def misfits(self, model: ModelConfig) -> list[str]:
        """Return the settings of `model` that this architecture does not support, as flags."""
        bad = [f"{flag(key)} {getattr(model, key)}" for key, value in self.wants.items() if getattr(model, key) != value]
        heads, hidden = model.num_attention_heads, model.hidden_size
        if not self.scales_rope:
            bad += [flag(name) for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor") if getattr(model, name)]
        if not self.grouped and model.query_groups != heads:
            bad.append(f"--num-query-groups {model.query_groups}")
        if hidden % heads or (not self.any_width and model.head_size != hidden // heads):
            bad.append(f"--kv-channels {model.head_size} with --hidden-size {hidden}")
        if bool(self.experts) != (model.num_experts is not None):
            bad.append(f"--num-experts {model.num_experts}")
        if self.experts and model.moe_router_pre_softmax and self.top_k_normalized is None:
            bad.append(f"{flag('moe_router_pre_softmax')} {model.moe_router_pre_softmax}")
        if self.experts and self.dense_layers is None and len(model.moe_layers) < model.num_layers:
            bad.append(f"--moe-layer-freq {model.moe_layer_freq}")
        return bad

    def rules(self, model: ModelConfig, vocab_size: int) -> Iterator[Rule]:
        """Yield one rule per tensor of our model."""
        hidden = model.hidden_size
        shapes = {EMBEDDING: (vocab_size, hidden), HEAD: (vocab_size, hidden), POSITIONS: (model.max_positions, hidden)}
        for ours, theirs in self.tops.items():
            if ours != HEAD or model.untie_embeddings_and_output_weights:
                yield Rule(ours, shapes.get(ours, (hidden,)), (theirs,), SAME, model)
        in_layer = _layer_shapes(model)
        for number in range(model.num_layers):
            mixture = number in model.moe_layers
            for module, (theirs_modules, layout) in self.modules.items():
                for name, shape in in_layer[module].items() if not (mixture and module.startswith("mlp.")) else ():
                    theirs_names = tuple(f"{self.layers.format(number)}{one}.{name}" for one in theirs_modules)
                    ours = f"decoder.layers.{number}.{module}.{name}"
                    yield Rule(ours, shape, theirs_names, layout, model, linear=len(shape) == 2)
            if mixture:
                yield from self._rules_of_experts(model, number)

    def _rules_of_experts(self, model: ModelConfig, layer: int) -> Iterator[Rule]:
        """Yield one rule for the router of a layer, and one for each matrix of each expert."""
        assert model.num_experts is not None
        hidden, width, count = model.hidden_size, model.expert_size, model.num_experts
        ours, theirs = f"decoder.layers.{layer}.mlp.", self.layers.format(layer)
        yield Rule(f"{ours}router.weight", (count, hidden), (f"{theirs}{self.router}.weight",), SAME, model)
        for name, shape in ("fc1_weight", (2 * width, hidden)), ("fc2_weight", (hidden, width)):
            modules, layout = self.experts[name]
            for e in range(count):
                names = tuple(f"{theirs}{one.format(e)}.weight" for one in modules)
                yield Rule(f"{ours}experts.{name}.{e}", shape, names, layout, model, linear=True)


def _layer_shapes(model: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, for each module of a layer, {weight or bias: shape}."""
    hidden, ffn, queries = model.hidden_size, model.ffn_size, model.num_attention_heads * model.head_size
    linears = {
        "self_attention.linear_qkv": (queries + 2 * model.query_groups * model.head_size, hidden),
        "self_attention.linear_proj": (hidden, queries),
        "mlp.linear_fc1": (2 * ffn if model.swiglu else ffn, hidden),
        "mlp.linear_fc2": (hidden, ffn),
    }
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in linears.items():
        bias = model.qkv_bias if name.endswith("qkv") else not model.disable_bias_linear
        shapes[name] = {"weight": shape, "bias": shape[:1]} if bias else {"weight": shape}
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        shapes[name] = {"weight": (hidden,)} if model.normalization == "RMSNorm" else {"weight": (hidden,), "bias": (hidden,)}
    for name, size in zip(("self_attention.q_layernorm", "self_attention.k_layernorm"), model.qk_norm_sizes or (), strict=False):
        shapes[name] = {"weight": (size,)}
    return shapes
