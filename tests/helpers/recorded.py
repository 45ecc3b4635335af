"""What stands for a GPU's graphs on a CPU: the operators of a run, repeated on the tensors of that run.

captured = Recorded().capture(run)
captured.replay()      # no Python of `run`: only what it called of torch, at the same addresses
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.lm.evaluation.decoding_graph import Captured

_WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}  # for which a host waits, and a capture is refused


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITS:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        views = all(x.untyped_storage().data_ptr() in given for x in made)
        if not views or func._schema.is_mutable:
            self.calls.append(functools.partial(_again, func, args, kwargs, [] if views else made))
        return result


def _again(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
    found = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
    for old, new in zip(made, found, strict=bool(made)):
        old.copy_(new)


class Recorded:
    """`megatron.lm.evaluation.decoding_graph.Device` without a device.

    Attributes:
        warm: eager runs.
        replays: of all that it captured.
    """

    def __init__(self) -> None:
        self.warm = self.replays = 0

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        self.warm += 1
        return run()

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        with _Recorder() as recorder:
            out = run()
        calls = recorder.calls

        def replay() -> None:
            self.replays += 1
            for call in calls:
                call()

        out.fill_(torch.nan)  # a capture computes nothing
        return Captured(replay, out)
