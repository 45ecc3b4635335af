"""megatron-core on a machine without CUDA: the one file that teaches it to live there.

megatron-core 0.16.1 names CUDA in its schedules, layers and random-number tracker. `cpu_home` answers those calls with their CPU
equivalents: a `TorchFunctionMode` for tensor arguments, and replacements for a few functions of `torch.cuda`. It is active only
where `torch.cuda.is_available()` is false, and it is the single exception to the rule against assignment into foreign modules.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _names_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.split(":")[0] == "cuda") or (isinstance(value, torch.device) and value.type == "cuda")


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects what is asked of CUDA, by keyword or through a tensor's methods, to the CPU."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # megatron-core's optimizers recognise trainable dtypes by the names of CUDA tensors.
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = kwargs | {"device": _CPU}
        return func(*args, **kwargs)


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
    def replace(owner: Any, name: str, value: object) -> None:
        stack.callback(setattr, owner, name, getattr(owner, name))
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
    replace(torch.cuda.random, "get_rng_state", _get_rng_state)
    replace(megatron_random, "_lazy_call", _call_now)
    logger = logging.getLogger(megatron_random.__name__)
    logger.addFilter(_is_news)
    stack.callback(logger.removeFilter, _is_news)
    stack.enter_context(_CudaMeansCpu())


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
