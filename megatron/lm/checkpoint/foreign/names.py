"""Names of a GPT's tensors in a checkpoint of Megatron-LM, and in ours.

Megatron-LM stores a weight under its name, and the optimizer's states under `optimizer.state.KIND.` plus that name. By default layers are
stacked: `decoder.layers.mlp.linear_fc2.weight` is [layers, ..]; with `non_homogeneous_layers` each has its own name, as in ours. The norm
before a linear layer has the name of Transformer Engine's fused layer, even if the model does not use it.
"""

import re
from typing import NamedTuple

# Kind of optimizer state -> our key. The master is `param` in `fully_reshardable`, and `fp32_param` in the other layouts.
STATES = {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
OPTIMIZER = "optimizer."
LAYERS = "decoder.layers."
_NORMS = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.", "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
_LAYER = re.compile(re.escape(LAYERS) + r"(\d+)\.(.+)")


class MegatronName(NamedTuple):
    """`prefix`: model, or the key of an optimizer state; `name`: ours, with `{}` for the layer number if layers are stacked."""

    prefix: str
    name: str
    stacked: bool


def ours(key: str) -> MegatronName | None:
    """Return our name for a key of Megatron-LM; None if it is neither a weight nor a state of one."""
    prefix, name = "model", key
    if key.startswith(OPTIMIZER):
        kind, _, name = key.removeprefix(f"{OPTIMIZER}state.").partition(".")
        if not key.startswith(f"{OPTIMIZER}state.") or kind not in STATES:
            return None
        prefix = STATES[kind]
    for theirs, own in _NORMS.items():
        name = name.replace(theirs, own)
    stacked = name.startswith(LAYERS) and not _LAYER.fullmatch(name)
    return MegatronName(prefix, LAYERS + "{}." + name.removeprefix(LAYERS) if stacked else name, stacked)


def theirs(name: str) -> tuple[str, int | None]:
    """Return Megatron-LM's name, with stacked layers, for one of our weights, and its layer number (None outside the layers)."""
    for megatron, own in _NORMS.items():
        name = name.replace(own, megatron)
    layer = _LAYER.fullmatch(name)
    return (LAYERS + layer[2], int(layer[1])) if layer else (name, None)


def layer_of(name: str) -> tuple[int | None, str]:
    """Return the layer number in one of our names, and the rest; None and the name outside the layers."""
    layer = _LAYER.fullmatch(name)
    return (int(layer[1]), layer[2]) if layer else (None, name)
