"""What `p.grad` is on several processes while the gradient is elsewhere: accumulating, or on its way to the other ranks.

A loop may edit or log gradients between backward and step, and what it does must not be lost because `p.grad` is None there. So `p.grad` is
an `FP8Gradient` whose values are fetched when they are first used: under `no_sync` this rank's sum so far, after the last backward the
average over the ranks. If nobody looks, nothing is computed, and the objects are used again in the next step.

`module.zero_grad()` and `p.grad = None`, which this library does not see, show by the object being gone.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from msamp.comm.accumulate import Accumulator
from msamp.numerics.fp8_gradient import FP8Gradient, while_alive
from msamp.numerics.tensor import ScalingTensor


class VisibleGradients:
    """The gradients that are in `p.grad` now.

    Args:
        params: all parameters.
        names: of the parameters, for messages.
        totals: the sums under `no_sync`; edits of `p.grad` change it.
        accumulators: of the parameters.

    Attributes:
        average_of: weak reference to the method that returns a parameter's average in its dtype, a ScalingTensor or a contiguous plain
            tensor, for those who use `p.grad` after the last backward; None shows nothing there.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Mapping[Tensor, str],
        totals: dict[Tensor, Tensor],
        accumulators: Mapping[Tensor, Accumulator],
    ) -> None:
        self._params, self._names, self._totals, self._accumulators = params, names, totals, accumulators
        self._index = {p: i for i, p in enumerate(params)}
        self.average_of: weakref.WeakMethod[Callable[[Tensor], Tensor]] | None = None
        self._backward = -1  # at the end of which sums are shown again
        self._shown: dict[Tensor, FP8Gradient] = {}
        self._spare: dict[Tensor, FP8Gradient] = {}  # nobody has used or kept them
        self._unshared = 0  # the reference count of a gradient that only `_shown` and a local variable hold

    def __contains__(self, p: Tensor) -> bool:
        return p in self._shown

    def put(self, p: Tensor) -> None:
        """Put an awaited gradient into `p.grad`."""
        gradient = self._spare.pop(p, None)
        if gradient is None or gradient.dtype != p.dtype or gradient.device != p.device:
            # A weak reference and an index, because the collector does not find a cycle through `p.grad`.
            gradient = FP8Gradient.awaited(p, functools.partial(_values, weakref.ref(self), self._index[p]))
        self._shown[p] = gradient
        self._unshared = sys.getrefcount(gradient)
        p.grad = gradient

    def put_average(self, p: Tensor) -> None:
        """Put the average over the ranks, which is not known yet, into `p.grad`."""
        if self.average_of is not None:
            self.put(p)

    def values(self, number: int) -> Tensor:
        """Return what `p.grad` is: this rank's sum under `no_sync`, else the average, which is collective if one was not sent yet."""
        p = self._params[number]
        total = self._totals.get(p)
        if total is not None:
            return total if isinstance(total, ScalingTensor) else total.to(p.dtype).contiguous()
        average_of = None if self.average_of is None else self.average_of()
        if torch._C._current_graph_task_id() != -1 or average_of is None:
            raise second_gradient(self._names[p])
        return average_of(p)

    def make_way(self, number: int, _: Tensor) -> None:
        """Before autograd adds to a `p.grad`: stop showing the sum of earlier micro-batches, and take over what was done to it."""
        p = self._params[number]
        if p in self._totals and p in self._shown:
            self._take_sum(p)
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:
                self._backward = backward
                torch.autograd.Variable._execution_engine.queue_callback(while_alive(self.show_sums))

    def _take_sum(self, p: Tensor) -> None:
        present, seen = self.lift(p, keep=True)
        if not present:
            del self._totals[p]
        elif isinstance(seen, FP8Gradient) and seen.edited and seen.held is not self._totals[p]:
            self._totals[p] = self._accumulators[p].add(None, seen.held)

    def take_sums(self) -> None:
        """After the last backward: as `make_way`, for all sums, and what replaced one is the sum."""
        for p in [p for p in self._totals if p in self._shown]:
            self._take_sum(p)
            if p.grad is not None:
                self._totals[p], p.grad = self._accumulators[p].add(None, p.grad), None

    def show_sums(self) -> None:
        """At the end of a backward: show the sums again that made way and were not added to, since it was `torch.autograd.grad`."""
        for p in self._totals:
            if p.grad is None:
                self.put(p)

    def lift(self, p: Tensor, *, keep: bool = False) -> tuple[bool, Tensor | None]:
        """Remove the gradient of `p`, so that `p.grad` is None or what other code has put there.

        Args:
            keep: fetch the values if other code holds the gradient; else it will raise when they are used.

        Returns:
            Whether the gradient was still in `p.grad`; and the gradient if its values were used, or what was in `p.grad` instead.
        """
        gradient = self._shown[p]
        present = p.grad is gradient
        if present:
            p.grad = None
        if not gradient.fetched:
            shared = sys.getrefcount(gradient) > self._unshared
            if shared and keep:
                gradient.dequantize()
            elif shared:
                gradient.expire(_expired)
            elif present:
                self._spare[p] = gradient
        del self._shown[p]
        return present, gradient if present and gradient.fetched else p.grad

    def changes(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the parameters whose gradients were edited, replaced or cleared, with what is in `p.grad`."""
        for p, gradient in list(self._shown.items()):
            if gradient.edited or p.grad is not gradient:
                yield p, p.grad

    def clear(self) -> None:
        """Remove all gradients."""
        for p in list(self._shown):
            self.lift(p)


def second_gradient(name: str) -> ValueError:
    """Return the error for a parameter whose gradient is needed in a backward after it was sent."""
    return ValueError(
        f"{name} got a second gradient in one step after its first had been sent, or a hook used p.grad during backward; "
        "run every backward of a step but the last under no_sync(), and call finish() and clear() between steps, or discard() to drop the "
        "gradients (the optimizer's zero_grad() does; the model's cannot); use p.grad after backward"
    )


def _values(visible: "weakref.ref[VisibleGradients]", number: int) -> Tensor:
    alive = visible()
    return _expired() if alive is None else alive.values(number)


def _expired() -> torch.Tensor:
    raise ValueError(
        "this gradient was never read before its step or zero_grad, so it was not averaged over the processes; read it between backward "
        "and step, or keep p.grad.clone()"
    )
