"""Names of a GPT's tensors in a checkpoint of Megatron-LM, and in ours.

Megatron-LM stores a weight under its name, and the optimizer's states under `optimizer.state.KIND.` and that name. By default the layers
are stacked: `decoder.layers.mlp.linear_fc2.weight` is [layers, ..]; with `non_homogeneous_layers` each has a name of its own, as in ours.
The norm before a linear layer has the name of Transformer Engine's fused layer, whichever layers the model was built from.
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
    """`prefix`: model, or the key of an optimizer state; `name`: ours, with `{}` for the layer's number where layers are stacked."""

    prefix: str
    name: str
    stacked: bool


def ours(key: str) -> MegatronName | None:
    """What a key of Megatron-LM stands for; None for one that is no weight and no state of a weight."""
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
    """The name in Megatron-LM of a weight of ours, with stacked layers, and its layer's number; None outside the layers."""
    for megatron, own in _NORMS.items():
        name = name.replace(own, megatron)
    layer = _LAYER.fullmatch(name)
    return (LAYERS + layer[2], int(layer[1])) if layer else (name, None)


def layer_of(name: str) -> tuple[int | None, str]:
    """The layer's number in a name of ours, and the rest; None and the name outside the layers."""
    layer = _LAYER.fullmatch(name)
    return (int(layer[1]), layer[2]) if layer else (None, name)
