"""The part of the optimizer that says which parameters this process updates, and how processes that share the work agree.

The optimizer measures gradients, decides whether a step can be taken, and launches updates. All of it is about the holdings of this
process. A `Shard` says what they are, where their gradients come from, and what their owners tell each other. `Whole` is one process
that updates everything; `msamp.parallel.greedy_zero.ZeRO` spreads parameters over the data-parallel ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from msamp.numerics.formats import Format, by_name
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import contiguous
from msamp.optim.grad_cast import GradCast
from msamp.optim.states import copy_of_rows, view_of_rows


@dataclass(eq=False)
class Holding:
    """The part of a parameter that one process updates: all of it, or (ZeRO) some of its rows.

    Attributes:
        param: the parameter.
        group: its parameter group.
        formats: those of its gradient, master and states, of the group's.
        index: its number over all groups: the order in which norms are added.
        weight: what is updated in place, the parameter itself or a view of its rows; `optimizer.state` is keyed by it.
        rows: which rows along dim 0 that is; None for all.
        place: its number over all holdings of this process.
        grad: of this step, in the group's gradient format.
        key: of the parameter's thresholds for stochastic rounding.
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
        """Index of this holding's first element in the parameter, or in a tensor-parallel shard of it."""
        return 0 if self.rows is None else self.rows.start * math.prod(self.param.shape[1:])

    def copy_of(self, x: torch.Tensor) -> torch.Tensor:
        """This holding's part of a state of the whole parameter: a copy of its rows, or `x` itself where the holding is everything."""
        return x if self.rows is None else copy_of_rows(x, self.rows)

    def as_written(self) -> torch.Tensor:
        """This holding's part of the parameter as it is now, after any write."""
        return self.weight if self.rows is None else view_of_rows(self.param, self.rows)


class Shard(Protocol):
    """The seam. All calls but `check` and `holdings` are collective among the processes that share the work."""

    @property
    def ranks(self) -> int:
        """How many processes share the work."""

    def check(self, group: Mapping[str, Any]) -> None:
        """ValueError for a parameter group with a parameter that cannot be shared."""

    def holdings(self, wholes: Sequence[Holding]) -> list[Holding]:
        """This process's holdings of whole parameters, in their order, with the same `weight` at every call."""

    def ready(self, wholes: Sequence[Holding]) -> list[Holding]:
        """The holdings that have a gradient in this step, with that gradient."""

    def largest(self, table: torch.Tensor) -> torch.Tensor:
        """FP32 [.., parameters] maxima of this process's holdings -> those of whole parameters."""

    def total(self, table: torch.Tensor) -> torch.Tensor:
        """int64 [parameters, 2] sums over this process's holdings -> those over whole parameters."""

    def send_weights(self, scale_invs: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """After the update: bring every process's parameters up to date.

        Args:
            scale_invs: parameter -> the FP32 0-dim scale_inv that its owner has stored, for parameters with a scale. Empty for one process.
        """

    def wait(self) -> None:
        """Let the compute stream wait for all weights that are still on their way."""

    def gather(
        self, wholes: Sequence[Holding], state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
    ) -> dict[int, dict[str, torch.Tensor]]:
        """The states of whole parameters by their index, from those of all processes, on the CPU of the first; empty elsewhere.

        Args:
            wholes: the parameters.
            state: of this process's holdings, by their `weight`.
        """


class Whole:
    """One process that updates every parameter. A gradient is `p.main_grad` where a synchroniser has put one, else `p.grad`."""

    ranks = 1

    def __init__(self) -> None:
        self._grad_cast = GradCast()

    def check(self, group: Mapping[str, Any]) -> None:
        """Takes everything."""

    def holdings(self, wholes: Sequence[Holding]) -> list[Holding]:
        return list(wholes)

    def ready(self, wholes: Sequence[Holding]) -> list[Holding]:
        """Those with a gradient, quantised to its format; ValueError for a sparse one."""
        found = []
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
            found.append(holding)
        for fmt, pairs in plain.items():
            for (holding, _), grad in zip(pairs, self._grad_cast([g for _, g in pairs], fmt), strict=True):
                holding.grad = grad
        return found

    def largest(self, table: torch.Tensor) -> torch.Tensor:
        return table

    def total(self, table: torch.Tensor) -> torch.Tensor:
        return table

    def send_weights(self, scale_invs: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """No other process has them."""

    def wait(self) -> None:
        """Nothing is on its way."""

    def gather(
        self, wholes: Sequence[Holding], state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
    ) -> dict[int, dict[str, torch.Tensor]]:
        return {whole.index: dict(state[whole.weight]) for whole in wholes if state.get(whole.weight)}


def gradient(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `p`: `p.main_grad` where a synchroniser has put one (Megatron's name), else `p.grad`."""
    main_grad = getattr(p, "main_grad", None)
    return p.grad if main_grad is None else main_grad
