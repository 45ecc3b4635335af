"""In which forms a model with low-precision weights leaves the process.

- `exact_state_dict`, which is what `model.state_dict()` gives by default: weights as ScalingTensors, the scales under
  `*.scaling.*`. Only this library reads it.
- `plain_state_dict` is what the model would have if it had never been converted, for everyone else: no scales.
- `fp8_state_dict` is exact and of plain tensors alone, for formats that know no other (safetensors): FP8 is one byte an element.

A converted model loads all three under `strict=True`, the first and the last bit for bit. Trainers and hubs ask a model for `state_dict()`
themselves and want the second: `save_plain` makes that the model's answer.
"""

import contextvars
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from msamp.nn.linear import transposed_weights
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.optimizer import FP8AdamW
from msamp.optim.updates import MASTER

_EXACT = contextvars.ContextVar("exact", default=False)  # True: the hook of `save_plain` does nothing


def exact_state_dict(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()` as it is without `save_plain`: what training resumes from to the bit."""
    token = _EXACT.set(True)
    try:
        return model.state_dict()
    finally:
        _EXACT.reset(token)


def plain_state_dict(model: nn.Module, optimizer: FP8AdamW | None = None) -> dict[str, torch.Tensor]:
    """The state of a converted model as its unconverted self has it: the same keys, plain tensors of the same dtypes.

    Args:
        model: any module tree.
        optimizer: of its weights; those with a master beside them (O3) are rounded from the master, which has more bits. Under ZeRO the
            call is collective then, and only the group's first rank gets the state; the others get an empty dict.

    Returns:
        Name -> tensor, on the model's devices; what was plain already is not copied.
    """
    masters = {} if optimizer is None else _masters(optimizer)
    if masters is None:
        return {}
    state = dict(exact_state_dict(model))
    _make_plain(model, state, "", masters)
    return state


def fp8_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The exact state of a converted model in plain tensors: in place of a low-precision weight its payload (float8_e4m3fn, or float16),
    beside it `<name>_scale_inv` (FP32, 0-dim); weight = payload * scale_inv. `load_state_dict` of a converted model takes it."""
    state: dict[str, torch.Tensor] = {}
    for key, value in exact_state_dict(model).items():
        if isinstance(value, ScalingTensor):
            state[key], state[f"{key}_scale_inv"] = value.payload.contiguous(), value.scale_inv
        else:
            state[key] = value
    return state


def save_plain(model: nn.Module, optimizer: FP8AdamW | None = None) -> RemovableHandle:
    """From now on `model.state_dict()` is `plain_state_dict(model, optimizer)`, and so whatever asks for it saves plain weights:
    `save_pretrained`, the Trainer of transformers, accelerate, safetensors. `msamp.initialize` does it for models with `save_pretrained`.

    The model does not keep the optimizer alive; a copy of the model is plain by its own weights. Under ZeRO, where the masters are spread
    and `state_dict` is asked of one rank alone, weights are those that multiply: for the masters call `plain_state_dict` on every rank.

    Returns:
        A handle; its `remove()` brings the exact form back.
    """
    return model.register_state_dict_post_hook(_Plain(optimizer))


class _Plain:
    """A hook that turns the state that `state_dict` has gathered into the plain one."""

    def __init__(self, optimizer: FP8AdamW | None = None) -> None:
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __call__(self, model: nn.Module, state: dict[str, torch.Tensor], prefix: str, local_metadata: Any) -> None:
        if _EXACT.get():
            return
        optimizer = None if self.optimizer is None else self.optimizer()
        masters = None if optimizer is None or optimizer.shard.ranks > 1 else _masters(optimizer)
        _make_plain(model, state, prefix, masters or {})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": None}


def _masters(optimizer: FP8AdamW) -> dict[int, torch.Tensor] | None:
    """id of a parameter -> the master beside it; None on ranks other than the first under ZeRO."""
    optimizer.reload_model_params()  # weights may have been loaded since
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in params]
    if optimizer.shard.ranks > 1:
        gathered = optimizer.state_dict()["state"]
        if not gathered:
            return None
        states = [gathered.get(index, {}) for index in range(len(params))]
    return {id(p): state[MASTER.key] for p, state in zip(params, states, strict=True) if MASTER.key in state}


def _make_plain(model: nn.Module, state: dict[str, torch.Tensor], prefix: str, masters: Mapping[int, torch.Tensor]) -> None:
    for name, module in model.named_modules(remove_duplicate=False):  # one that is used under several names is saved under each
        if isinstance(module, LinearScaling):
            for buffer, _ in module.named_buffers(recurse=False):
                state.pop(f"{prefix}{name}.{buffer}", None)
    transposed = transposed_weights(model)
    for name, p in model.named_parameters(remove_duplicate=False):
        key = prefix + name
        if key in state and isinstance(p, ScalingTensor):
            value = fp32_values(masters.get(id(p), p)).to(p.device, p.dtype)
            state[key] = value.t().contiguous() if name in transposed else value
