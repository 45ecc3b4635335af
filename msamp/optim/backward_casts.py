"""Cast gradients to FP8 while backward runs, so that BF16 gradients of the whole model never exist at the same time.

A hook on each parameter whose recipe has FP8 gradients notes that backward has left a gradient in `p.grad`. Once a group of gradients is
complete, and at the end of backward, `GradCast` casts the group in a few launches, `p.grad` becomes an `FP8Gradient`, and the memory of the
wide gradients is free for the rest of backward. The optimizer would have cast them in the same way in its step: the bits are the same.

A group has an eighth of all elements, or `GROUP_ELEMENTS` if that is more: casting a group costs the host the same time whatever its size.
The wide gradients of one group exist at a time: a quarter byte per parameter, or 512 MiB.

A second backward before `zero_grad` widens an FP8Gradient, and it stays wide: cast again, it would be a sum in FP8. What backward adds to
zeros (`zero_grad(set_to_none=False)`) is cast as usual.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from msamp.numerics.formats import Format, by_name
from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.grad_cast import GradCast

GROUP_ELEMENTS = 2**28  # 512 MiB of BF16
GROUPS = 8  # groups per backward of a large model

Place = tuple[torch.device, int]  # a device, and the stream on which its gradients arrived


class BackwardCasts:
    """The hooks that cast the gradients of one optimizer's parameters."""

    def __init__(self) -> None:
        self._formats: dict[int, Format] = {}  # by the id of a parameter, which the optimizer holds
        self._total = 0  # elements of the hooked parameters
        self._handles: dict[int, RemovableHandle] = {}
        self._pending: dict[Place, dict[int, torch.Tensor]] = {}
        self._elements: dict[Place, int] = {}
        self._casts: dict[tuple[Place, int, Format], GradCast] = {}  # by their place in backward: the same gradients in every step
        self._flushes: dict[Place, int] = {}
        self._backward = -1
        self._paused = 0

    def attach(self, params: Iterable[tuple[torch.Tensor, Mapping[str, str]]]) -> None:
        """Hook the parameters that are not hooked yet, require a gradient, and have an FP8 gradient format.

        Args:
            params: with the names of their formats.
        """
        for p, formats in params:
            if id(p) in self._formats or not p.requires_grad:
                continue
            fmt = by_name(formats["grad"])
            if fmt.scaled and fmt.bytes == 1:
                self._formats[id(p)] = fmt
                self._total += p.numel()
                # A weak reference: hooks live in autograd's graph, where the collector does not find a cycle back to the model.
                self._handles[id(p)] = p.register_post_accumulate_grad_hook(functools.partial(_arrived, weakref.ref(self)))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self.__init__()  # type: ignore[misc]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which gradients are not cast, because more will be accumulated."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def arrived(self, p: torch.Tensor) -> None:
        """Record a gradient that backward has accumulated in `p.grad`, and cast its group once that is complete."""
        if self._paused or not _can_be_cast(p.grad) or id(p) not in self._formats:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._flushes = backward, {}  # gradients that a failed backward left in `_pending` are cast with the rest
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_ended, weakref.ref(self)))
        place = p.device, _stream(p)
        self._pending.setdefault(place, {})[id(p)] = p
        self._elements[place] = self._elements.get(place, 0) + p.numel()
        if self._elements[place] >= max(GROUP_ELEMENTS, self._total // GROUPS):
            self._cast(place)

    def ended(self) -> None:
        """Cast the rest, at the end of backward."""
        for place in list(self._pending):
            self._cast(place)

    @torch.no_grad()
    def _cast(self, place: Place) -> None:
        number = self._flushes[place] = self._flushes.get(place, 0) + 1
        self._elements[place] = 0
        by_format: dict[Format, list[torch.Tensor]] = {}
        for p in self._pending.pop(place).values():
            if _can_be_cast(p.grad):  # hooks of the loop may have taken it since
                by_format.setdefault(self._formats[id(p)], []).append(p)
        for fmt, params in by_format.items():
            cast = self._casts.setdefault((place, number, fmt), GradCast())
            gradients = [_plain(p.grad) for p in params]
            if place[1] != _stream(params[0]):
                for g in gradients:
                    g.record_stream(torch.cuda.current_stream(place[0]))
            for p, narrow in zip(params, cast(gradients, fmt), strict=True):
                assert isinstance(narrow, ScalingTensor)
                if isinstance(p.grad, FP8Gradient):
                    p.grad.narrow_to(narrow)
                else:
                    p.grad = FP8Gradient(narrow)


def _can_be_cast(g: torch.Tensor | None) -> bool:
    """Whether a gradient is the result of a single backward, in memory that may be freed."""
    if isinstance(g, FP8Gradient):
        return g.was_zeroed and not isinstance(g.held, ScalingTensor)
    if type(g) is not torch.Tensor or g.requires_grad or g.layout is not torch.strided:
        return False
    return not (g.is_cuda and torch.cuda.is_current_stream_capturing())


def _plain(g: Any) -> torch.Tensor:
    return g.held if isinstance(g, FP8Gradient) else g  # type: ignore[no-any-return]


def _stream(p: torch.Tensor) -> int:
    return torch.cuda.current_stream(p.device).cuda_stream if p.is_cuda else 0


def _arrived(casts: "weakref.ref[BackwardCasts]", p: torch.Tensor) -> None:
    alive = casts()
    if alive is not None:
        alive.arrived(p)


def _ended(casts: "weakref.ref[BackwardCasts]") -> None:
    alive = casts()
    if alive is not None:
        alive.ended()
