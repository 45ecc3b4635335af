"""The interface through which an optimizer is sharded: which parameters this process updates, and what it exchanges with the others.

The optimizer measures gradients, decides whether to take a step, and launches updates, all for the holdings of this process. A `Shard`
defines the holdings and their gradients, and combines results over processes. `msamp.parallel.greedy_zero.ZeRO` distributes parameters
over the data-parallel ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from msamp.numerics.formats import Format, by_name
from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.tensor import ScalingTensor, contiguous
from msamp.optim.grad_cast import GradCast
from msamp.optim.states import copy_of_rows, make_master, view_of_rows


@dataclass(eq=False)
class Holding:
    """The part of a parameter that one process updates: all of it, or (ZeRO) some of its rows.

    Attributes:
        param: the parameter.
        group: its parameter group.
        formats: of its gradient, master and states.
        index: the parameter's index over all groups; norms are summed in this order.
        weight: the tensor to update in place, the parameter itself or a view of its rows; the key of `optimizer.state`.
        rows: the rows along dim 0; None for all.
        place: index over all holdings of this process.
        grad: of this step, in the group's gradient format.
        key: of the parameter, for stochastic rounding.
    """

    param: torch.Tensor
    group: dict[str, Any]
    formats: Mapping[str, str]
    index: int
    weight: torch.Tensor
    rows: slice | None = None
    place: int = 0
    grad: torch.Tensor | None = None
    key: int = 0

    @property
    def offset(self) -> int:
        """Index of this holding's first element in the parameter, or in its tensor-parallel shard."""
        return 0 if self.rows is None else self.rows.start * math.prod(self.param.shape[1:])

    def copy_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return this holding's part of a whole parameter's state: a copy of its rows, or `x` itself if the holding is all of it."""
        return x if self.rows is None else copy_of_rows(x, self.rows)

    def master(self, fmt: Format, values: torch.Tensor | None) -> torch.Tensor:
        """Return this holding's part of a new master of the whole parameter; `values` are what it was before rounding, if known."""
        return self.copy_of(make_master(self.param, fmt, values))

    @property
    def whole(self) -> torch.Tensor:
        """What the scale of a master that follows its weight is taken from, the same for all parts of the parameter."""
        return self.param

    def as_written(self) -> torch.Tensor:
        """Return this holding's part of the parameter's current values."""
        return self.weight if self.rows is None else view_of_rows(self.param, self.rows)


class Shard:
    """The interface of a sharded optimizer, and one process that updates every parameter. All methods but `check` and `holdings` are
    collective among its processes.

    Attributes:
        ranks: number of processes that share the optimizer.
        deferred: whether the updated parameters are still to be sent, by `wait` or a CUDA graph. Until then nothing may read them.
    """

    ranks = 1
    deferred = False

    def __init__(self) -> None:
        self._grad_cast = GradCast()

    @property
    def stale(self) -> bool:
        """Whether a step must be eager before a CUDA graph is replayed, since something has written weights."""
        return False

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise a ValueError for a parameter group with a parameter that cannot be sharded."""

    def holdings(self, wholes: Sequence[Holding]) -> list[Holding]:
        """Return this process's holdings of whole parameters, in their order, with the same `weight` objects at every call."""
        return list(wholes)

    def ready(self, wholes: Sequence[Holding]) -> list[Holding]:
        """Return the holdings that have a gradient in this step, with that gradient in its format. Here it is `p.main_grad` if a
        synchronizer has set it, else `p.grad`; ValueError for a sparse one."""
        holdings = []
        plain: dict[Format, list[tuple[Holding, torch.Tensor]]] = {}
        for holding in wholes:
            g = gradient(holding.param)
            if g is None:
                continue
            if g.is_sparse:
                raise ValueError(f"the gradient of a parameter of shape {tuple(g.shape)} is sparse; use dense embeddings")
            if isinstance(g, ScalingTensor):
                holding.grad = contiguous(g)
            else:
                plain.setdefault(by_name(holding.formats["grad"]), []).append((holding, g))
            holdings.append(holding)
        for fmt, pairs in plain.items():
            for (holding, _), grad in zip(pairs, self._grad_cast([g for _, g in pairs], fmt), strict=True):
                holding.grad = grad
        return holdings

    def largest(self, table: torch.Tensor) -> torch.Tensor:
        """Combine FP32 [.., parameters] maxima of this process's holdings into the maxima of whole parameters."""
        return table

    def total(self, table: torch.Tensor) -> torch.Tensor:
        """Combine int64 [parameters, 2] sums over this process's holdings into those over whole parameters."""
        return table

    def send_weights(self, scale_invs: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """After the update: send the updated parameters to all processes.

        Args:
            scale_invs: parameter -> the scale_inv that its owner stored, FP32 0-dim, for parameters with a scale. Empty for one process.
        """

    def wait(self) -> None:
        """Make the compute stream wait for all weights that are still being gathered; send them first if they are `deferred`."""

    def gather(
        self, wholes: Sequence[Holding], state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]], *, everywhere: bool = False
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Gather the states of whole parameters, by index, on the CPU of the first process; empty elsewhere.

        Args:
            wholes: the parameters.
            state: of this process's holdings, by their `weight`.
            everywhere: gather them on every process.
        """
        return {whole.index: dict(state[whole.weight]) for whole in wholes if state.get(whole.weight)}


Whole = Shard  # the name in optimizers that were pickled before


def gradient(p: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of `p` as it is stored: `p.main_grad` (Megatron's name) if a synchronizer has set it, else `p.grad`."""
    main_grad = getattr(p, "main_grad", None)
    g = p.grad if main_grad is None else main_grad
    return g.held if isinstance(g, FP8Gradient) else g
