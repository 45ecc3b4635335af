"""Patches of torch that let megatron-core run on a machine without CUDA.

megatron-core 0.16.1 hard-codes CUDA in its schedules, layers and random-number tracker. `cpu_home` replaces a few functions of
`torch.cuda`, of tensor creation and of tensors with CPU equivalents. A `TorchFunctionMode` would need no list of them, but intercepts every
call and every attribute of a tensor, which took a fifth of the training time of a small model. Functions not in the list raise torch's
error about missing CUDA. The patches are active only if `torch.cuda.is_available()` is false, and they are the only exception to the rule
against assignment into other modules.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_TO, _TYPE = torch.Tensor.to, torch.Tensor.type
_MAKE_TENSORS = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones", "ones_like"),
    *("rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)


def _names_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.split(":")[0] == "cuda") or (isinstance(value, torch.device) and value.type == "cuda")


def _on_cpu(make: Callable) -> Callable:
    """Wrap a function that creates tensors, so that it creates CUDA tensors on the CPU, and in ordinary memory."""

    @wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):  # context parallelism's rotary embedding copies indices to the GPU; memory to pin needs one
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return call


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and _names_cuda(args[0]):
        args = (_CPU, *args[1:])
    elif _names_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    return _TO(self, *args, **kwargs)


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    name = _TYPE(self, *args, **kwargs)
    # megatron-core's optimizers recognize trainable dtypes by the names of CUDA tensor types.
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name


def _current_device() -> torch.device:
    return _CPU


class _OneGenerator:
    """Replacement of `torch.cuda.default_generators`: the CPU's one generator for every index."""

    def __getitem__(self, _index: object) -> torch.Generator:
        return torch.default_generator


def _is_news(record: logging.LogRecord) -> bool:
    # The tracker logs an error when the CPU generator advances, but here that is the generator that it tracks.
    return "CPU RNG state changed" not in record.getMessage()


def _enter(stack: ExitStack) -> None:
    # `with torch.device(...)` caches once which functions create tensors. Here it would cache our functions for good, and a transformers
    # model created on "meta" would then contain uninitialized memory.
    _device_constructors()

    def replace(owner: Any, name: str, value: object) -> None:
        own = name in vars(owner)  # torch.Tensor inherits its methods, so restoring deletes ours
        stack.callback(setattr, owner, name, getattr(owner, name)) if own else stack.callback(delattr, owner, name)
        setattr(owner, name, value)

    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    for name, value in {
        "current_device": _current_device,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": get_rng_state,
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "default_generators": _OneGenerator(),
    }.items():
        replace(torch.cuda, name, value)
    for name in _MAKE_TENSORS:
        replace(torch, name, _on_cpu(getattr(torch, name)))
    for name, method in {"cuda": lambda x, *_, **__: x, "to": _to, "type": _type}.items():
        replace(torch.Tensor, name, method)
    replace(torch.cuda.random, "get_rng_state", get_rng_state)
    replace(megatron_random, "_lazy_call", lambda function, **_: function())
    logger = logging.getLogger(megatron_random.__name__)
    logger.addFilter(_is_news)
    stack.callback(logger.removeFilter, _is_news)


def is_active() -> bool:
    """Return whether the patches are active."""
    return torch.cuda.current_device is _current_device


def enter_cpu_home() -> None:
    """Activate the patches for the rest of the process; do nothing with CUDA, or if they are active."""
    if not torch.cuda.is_available() and not is_active():
        _enter(ExitStack())


@contextmanager
def cpu_home() -> Iterator[None]:
    """Activate the patches inside a `with` block and restore everything at its end; do nothing with CUDA, or when nested."""
    with ExitStack() as stack:
        if not torch.cuda.is_available() and not is_active():
            _enter(stack)
        yield
