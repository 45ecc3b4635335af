"""Plain pickle for tensors of one byte per element: torch.save and copies support float8, but pickle cannot restore its storage.

A float8 tensor in an optimizer's state, such as COAT's payloads or Collage's remainders, is pickled as bytes and its dtype, as a
ScalingTensor does with its payload.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch


class AsBytes:
    """A float8 tensor that pickle and deepcopy restore as the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.tensor.view(torch.uint8), self.tensor.dtype)


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """Return what `Optimizer.__getstate__` returned, with plain float8 tensors in the parameters' states as `AsBytes`."""

    def change(x: Any) -> Any:
        return AsBytes(x) if type(x) is torch.Tensor and x.is_floating_point() and x.itemsize == 1 else x

    return {**state, "state": _each(state["state"], change)}


def unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """Undo `packed`, for `Optimizer.__setstate__`: a shallow copy has `AsBytes`, which nothing restored."""
    return {**state, "state": _each(state["state"], lambda x: x.tensor if isinstance(x, AsBytes) else x)} if "state" in state else state


def _each(states: Mapping[Any, Any], change: Any) -> Mapping[Any, Any]:
    changed = {key: {name: change(x) for name, x in own.items()} if isinstance(own, dict) else own for key, own in states.items()}
    return defaultdict(dict, changed) if isinstance(states, defaultdict) else changed


def _restored(payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return payload.view(dtype)
