"""megatron-core on a machine without CUDA: the one file that teaches it to live there.

megatron-core 0.16.1 names CUDA in its schedules, layers and random-number tracker. `cpu_home` answers those calls with their CPU
equivalents: functions in place of a few of `torch.cuda`, of those that make tensors, and of a tensor's methods. A `TorchFunctionMode`
would need no list of them, but sees every call and every attribute of a tensor: a fifth of a small model's training was spent in it.
What is not in the list says that torch has no CUDA. The home is active only where `torch.cuda.is_available()` is false, and it is the
single exception to the rule against assignment into foreign modules.
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
    """Wraps a function that makes tensors: those for CUDA are made on the CPU."""

    @wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return make(*args, **kwargs)

    return call


def _cuda(self: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    return self


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and _names_cuda(args[0]):
        args = (_CPU, *args[1:])
    elif _names_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    return _TO(self, *args, **kwargs)


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _TYPE(self, *args, **kwargs)
    # megatron-core's optimizers recognise trainable dtypes by the names of CUDA tensors.
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


def _current_device() -> torch.device:
    return _CPU


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _call_now(function: Callable[[], None], **_kwargs: object) -> None:
    function()


class _OneGenerator:
    """Stands for `torch.cuda.default_generators`: whatever the index, there is one generator on a CPU."""

    def __getitem__(self, _index: object) -> torch.Generator:
        return torch.default_generator


def _is_news(record: logging.LogRecord) -> bool:
    # The tracker takes the CPU generator moving for a mistake; here that generator is the one it tracks.
    return "CPU RNG state changed" not in record.getMessage()


def _enter(stack: ExitStack) -> None:
    # `with torch.device(...)` looks up once which functions make tensors. Inside the home it would find our functions alone, for good: a
    # model of transformers, which is made on "meta", would then be filled with what stood in memory.
    _device_constructors()

    def replace(owner: Any, name: str, value: object) -> None:
        own = name in vars(owner)  # torch.Tensor inherits its methods: functions put in front of them are removed
        stack.callback(setattr, owner, name, getattr(owner, name)) if own else stack.callback(delattr, owner, name)
        setattr(owner, name, value)

    for name, value in {
        "current_device": _current_device,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _manual_seed,
        "default_generators": _OneGenerator(),
    }.items():
        replace(torch.cuda, name, value)
    for name in _MAKE_TENSORS:
        replace(torch, name, _on_cpu(getattr(torch, name)))
    for name, method in {"cuda": _cuda, "to": _to, "type": _type}.items():
        replace(torch.Tensor, name, method)
    replace(torch.cuda.random, "get_rng_state", _get_rng_state)
    replace(megatron_random, "_lazy_call", _call_now)
    logger = logging.getLogger(megatron_random.__name__)
    logger.addFilter(_is_news)
    stack.callback(logger.removeFilter, _is_news)


def is_active() -> bool:
    """Whether this process lives in the CPU home now."""
    return torch.cuda.current_device is _current_device


def enter_cpu_home() -> None:
    """Enter the CPU home for the rest of the process; nothing where CUDA exists or the process is already in it."""
    if not torch.cuda.is_available() and not is_active():
        _enter(ExitStack())


@contextmanager
def cpu_home() -> Iterator[None]:
    """Live in the CPU home inside a `with` block and restore everything on leaving; nothing where CUDA exists or when nested."""
    with ExitStack() as stack:
        if not torch.cuda.is_available() and not is_active():
            _enter(stack)
        yield
