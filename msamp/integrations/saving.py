"""The state dicts of a model with low-precision weights.

- `exact_state_dict`, the default of `model.state_dict()`: weights as ScalingTensors, scales under `*.scaling.*`. Only this library can
  read it.
- `plain_state_dict`: the state dict of the unconverted model, without scales, for other software.
- `fp8_state_dict`: exact, but with plain tensors only, for formats such as safetensors; FP8 is 1 byte per element.

A converted model loads all three with `strict=True`, the first and the last bit for bit. Trainers and hubs call `model.state_dict()`
themselves and need the second: `save_plain` makes the model return it.
"""

import contextvars
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from msamp.nn.expert_matrices import joined_weights
from msamp.nn.linear import transposed_weights
from msamp.nn.scaling_state import LinearScaling
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.updates import MASTER

_EXACT = contextvars.ContextVar("exact", default=False)  # True disables the hook of `save_plain`


def exact_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` without the effect of `save_plain`: training resumes from it bit for bit."""
    context = contextvars.copy_context()
    context.run(_EXACT.set, True)
    return context.run(model.state_dict)


def plain_state_dict(
    model: nn.Module, optimizer: LowPrecisionOptimizer | None = None, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return the state dict of the unconverted model: the same keys, with plain tensors of the same dtypes.

    Args:
        model: any module tree.
        optimizer: of its weights; weights with a separate master (O3) are rounded from the master, which has more bits. Under ZeRO the
            call is then collective, and only the group's first rank gets the state; the others get an empty dict.
        dtype: of the floating-point parameters in the state; None keeps that of each parameter. Masters have more bits than BF16: training
            at a small learning rate moves most weights by less than half a step of BF16. FP32 keeps such a change and BF16 rounds it away.

    Returns:
        Name -> tensor, on the model's devices; plain tensors are not copied.
    """
    masters = {} if optimizer is None else masters_of(optimizer)
    if masters is None:
        return {}
    state = exact_state_dict(model)  # keeps the versions of the modules' states (`_metadata`)
    _make_plain(model, state, "", masters)
    if dtype is not None:
        for names, value in plain_weights(model, masters):
            state |= dict.fromkeys(names, value.to(dtype))
    return state


def plain_weights(model: nn.Module, masters: Mapping[int, torch.Tensor]) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield each floating-point parameter of the unconverted model once: its names, and its values in FP32, from the master where there is
    one.

    masters: `masters_of` the optimizer.
    """
    transposed, joined, names = transposed_weights(model), joined_weights(model), defaultdict(list)
    within = {part for parts in joined.values() for part in parts}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.is_floating_point() and name not in within:
            names[p].append(name)
    for name, parts in joined.items():
        yield [name], torch.stack([_value(model.get_parameter(part), masters, False) for part in parts])
    for p, own in names.items():
        yield own, _value(p, masters, own[0] in transposed)


def _value(p: torch.Tensor, masters: Mapping[int, torch.Tensor], transposed: bool) -> torch.Tensor:
    value = fp32_values(masters.get(id(p), p)).to(p.device)
    return value.t().contiguous() if transposed else value


def fp8_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the exact state of a converted model in plain tensors: for a low-precision weight its payload (float8_e4m3fn or float16) and
    `<name>_scale_inv` (FP32, 0-dim), with weight = payload * scale_inv. `load_state_dict` of a converted model accepts it."""
    state = exact_state_dict(model)
    for key, value in list(state.items()):
        if isinstance(value, ScalingTensor):
            state[key], state[f"{key}_scale_inv"] = value.payload.contiguous(), value.scale_inv
    return state


def save_plain(model: nn.Module, optimizer: LowPrecisionOptimizer | None = None) -> RemovableHandle:
    """Make `model.state_dict()` return `plain_state_dict(model, optimizer)` from now on, and the `state_dict()` of each part its share, so
    that everything that calls it saves plain weights: `save_pretrained`, transformers' Trainer, accelerate, PEFT, safetensors.
    `msamp.initialize` does this for models with `save_pretrained`.

    The model does not keep the optimizer alive; a copy of the model uses its own weights. Under ZeRO the masters are sharded and
    `state_dict` is called on one rank only, so it uses the FP8 weights: to save the masters call `plain_state_dict` on every rank.

    Returns:
        A handle; its `remove()` restores the exact state dict.
    """
    whole, *parts = (module._state_dict_hooks for module in model.modules())
    handle = RemovableHandle(whole, extra_dict=parts)
    whole[handle.id] = _Plain(optimizer)
    for hooks in parts:
        hooks[handle.id] = _Plain(optimizer, part=True)
    return handle


class _Plain:
    """A `state_dict` hook that converts the state to the plain one; that of a `part` only where the call began at it."""

    part = False

    def __init__(self, optimizer: LowPrecisionOptimizer | None = None, part: bool = False) -> None:
        self.optimizer, self.part = None if optimizer is None else weakref.ref(optimizer), part

    def __call__(self, model: nn.Module, state: dict[str, torch.Tensor], prefix: str, local_metadata: Any) -> None:
        calls = getattr(state, "_metadata", ())  # prefixes of the modules whose states are in it; a caller's dict has none
        if _EXACT.get() or (self.part and any(key != prefix[:-1] and prefix.startswith(key and f"{key}.") for key in calls)):
            return
        optimizer = None if self.optimizer is None else self.optimizer()
        masters = None if optimizer is None or optimizer.shard.ranks > 1 else masters_of(optimizer)
        _make_plain(model, state, prefix, masters or {})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": None, "part": self.part}


def masters_of(optimizer: LowPrecisionOptimizer, *, everywhere: bool = False) -> dict[int, torch.Tensor] | None:
    """Return id of a parameter -> its separate master; None on ranks other than the first under ZeRO, unless `everywhere`. Collective."""
    optimizer.reload_model_params()  # weights may have been loaded since the last step
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in params]
    if optimizer.shard.ranks > 1:
        gathered = optimizer.state_dict(everywhere=everywhere)["state"]
        if not gathered:
            return None
        states = [gathered.get(index, {}) for index in range(len(params))]
    return {id(p): state[MASTER.key] for p, state in zip(params, states, strict=True) if MASTER.key in state}


def _make_plain(model: nn.Module, state: dict[str, torch.Tensor], prefix: str, masters: Mapping[int, torch.Tensor]) -> None:
    for name, module in model.named_modules(remove_duplicate=False):  # a module with several names is saved under each
        if isinstance(module, LinearScaling):
            for buffer, _ in module.named_buffers():
                state.pop(f"{prefix}{name}.{buffer}", None)
    transposed = transposed_weights(model)
    for name, p in model.named_parameters(remove_duplicate=False):
        if prefix + name in state and isinstance(p, ScalingTensor):
            state[prefix + name] = _value(p, masters, name in transposed).to(p.dtype)
    _join_experts(model, state, prefix)


def _join_experts(model: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Replace the matrices of experts by their weight [E, N, K], at the place of the first one."""
    first = {prefix + parts[0]: (prefix + name, [prefix + part for part in parts]) for name, parts in joined_weights(model).items()}
    if not any(key in state for key in first):
        return
    values = dict(state)
    state.clear()
    rest: set[str] = set()
    for key, value in values.items():
        if key in first:
            name, parts = first[key]
            state[name] = torch.stack([values[part] for part in parts])
            rest |= set(parts)
        elif key not in rest:
            state[key] = value
