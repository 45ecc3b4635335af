"""The optimizer of a loop of one's own: FP8AdamW, which in a step also averages the gradients and rolls the scales of the casts.

Both belong to the object and not to hooks on it, which torch drops from copies and pickles. A copy of (model, optimizer) made together
trains on as the two did. On several processes there is no copy: the synchroniser of the gradients hangs on the parameters of its model.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from msamp.comm.accumulate import squares_are_finite
from msamp.comm.grad_sync import GradSync
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.formats import FP32, Format
from msamp.numerics.recipe import FP32_STATES, Recipe, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.backward_casts import BackwardCasts
from msamp.optim.clip import clip_, clip_coefficient
from msamp.optim.decision import GradientDecision, LossScale
from msamp.optim.foreign_states import in_own_formats, packed_names, unpacked_names
from msamp.optim.kept_states import update_of
from msamp.optim.optimizer import FP8AdamW
from msamp.optim.shard import Holding, Whole, gradient
from msamp.optim.states import local, parameter_kind, weight_format
from msamp.optim.updates import formats_of
from msamp.parallel.data_parallel import grad_sync

_MARK = "_msamp_taken"  # attribute of a gradient

_LIVE: "weakref.WeakSet[LoopOptimizer]" = weakref.WeakSet()  # clipping and hosts find them by their parameters


def parameter_formats(p: torch.Tensor, recipe: Recipe, update: str | None = None) -> StateFormats:
    """The formats of gradient, master and moments of a parameter of a converted model, and its update, by default the recipe's own.

    A plain FP32 parameter is its own master, whatever the recipe's format: a narrower copy would take more memory and know less.
    """
    states = recipe.formats_of(parameter_kind(p))
    if weight_format(p) == FP32:
        states = states.varied(master=FP32)
    return states if update is None else states.varied(update=update)


class NoDistributedDataParallel:
    """Raises where DistributedDataParallel asks a model for parameters to ignore: the model must not be wrapped."""

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            "DistributedDataParallel cannot hold a model of msamp.initialize: its optimizer averages the gradients itself; use the model "
            "as it is, with optimizer.no_sync(); under accelerate take msamp.integrations.accelerate.Accelerator, and in place of the "
            "Trainer of transformers msamp.integrations.transformers.Trainer"
        )


class GradScale:
    """The `grad_scale` of torch's GradScaler as the optimizer's loss scale.

    Args:
        factor: FP32 0-dim, by what the gradients are too large.
    """

    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor

    def scale(self, device: torch.device) -> torch.Tensor:
        """The factor on `device`."""
        return self.factor.to(device, torch.float32)

    def update(self, overflow: torch.Tensor) -> None:
        """Nothing: GradScaler has its own record of overflows."""


class LoopOptimizer(FP8AdamW):
    """What `msamp.initialize` returns.

    A step that is skipped, by a gradient that is not finite or by torch's GradScaler, leaves no trace in the amax histories and scales of
    the casts. GradScaler calls `step` for every step and sets `grad_scale` and `found_inf` for it (its protocol for fused optimizers,
    `torch.amp.grad_scaler.GradScaler.step`), and the device decides. A loop that skips a step by itself calls `zero_grad` of this
    optimizer; a model's own `zero_grad` does not reach the amaxes (`ScalingState.abandon`).

    A group without `formats`, one added later too, takes the recipe's formats for each of its parameters, and the default update. The
    formats of other groups have no effect on it.

    Args:
        params: parameters or groups, of a converted model.
        recipe: of the formats.
        scaling: the scales of the model's linear layers, which a step rolls.
        grad_sync: averages gradients over several processes; None on one.
        settings: FP8AdamW's others; of `formats` only the update counts, by default the recipe's own.

    Attributes:
        grad_sync: as given.
        casts: of gradients to FP8 during backward, on one process.
    """

    _step_supports_amp_scaling = True  # what GradScaler asks for
    _averaged = False  # since the last step
    _told = False  # that nothing is clipped
    live = True  # until another optimizer of `msamp.initialize` replaces it

    def __init__(
        self, params: Iterable[Any], recipe: Recipe, scaling: ScalingState, grad_sync: GradSync | None = None, **settings: Any
    ) -> None:
        self.recipe, self.scaling, self.grad_sync, self.casts = recipe, scaling, grad_sync, BackwardCasts()
        super().__init__(params, **settings)
        _LIVE.add(self)
        self._attach_casts()

    def __setstate__(self, state: dict[str, Any]) -> None:
        taken = state.pop("taken", None)  # torch's load_state_dict comes here too, and leaves the gradients as they are
        super().__setstate__(state)
        if "casts" not in vars(self):
            self.casts = BackwardCasts()
        self._attach_casts()
        if taken is not None:
            self._taken(taken)  # a copied gradient has a version of its own
        _LIVE.add(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As FP8AdamW's, with the recipe's formats where the group has none, and a name for each parameter where the others have names.

        On several processes the call is collective where a parameter begins to want a gradient, such as one that was frozen before: its
        gradients are averaged from then on (`renew_grad_sync`).

        Raises:
            ValueError: on several processes for a parameter outside of the model, which nothing would average, and for what
                `renew_grad_sync` refuses. The optimizer is as it was then.
        """
        params = param_group["params"]
        if not isinstance(params, set):
            params = [params] if isinstance(params, torch.Tensor) else list(params)
            tensors = [p[1] if isinstance(p, tuple) else p for p in params]
            renewed = self._unaveraged(tensors)
            param_group["params"] = params
            usual = self.defaults["formats"].update
            update = None if usual == FP32_STATES.update else usual
            param_group.setdefault("formats", [parameter_formats(p, self.recipe, update) for p in tensors])
            named = any(isinstance(p, tuple) for p in params) or "param_names" in param_group
            if not named and any("param_names" in group for group in self.param_groups):
                param_group["param_names"] = [f"parameter {i} of group {len(self.param_groups)}" for i in range(len(params))]
        super().add_param_group(param_group)
        if not isinstance(params, set) and renewed:
            self.renew_grad_sync()
        self._attach_casts()

    def _attach_casts(self) -> None:
        """Cast gradients during backward where one process has whole ones and no synchroniser takes them."""
        if self.live and self.grad_sync is None and isinstance(self.shard, Whole):
            self.casts.attach(pair for group in self.param_groups for pair in zip(group["params"], formats_of(group), strict=True))

    def _unaveraged(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether the synchroniser has to be rebuilt for parameters that are to be updated; ValueError where it cannot."""
        if self.grad_sync is None:
            return False
        model = self.grad_sync.model()
        known = {id(p) for p in model.parameters()} if model is not None else set()
        outside = [tuple(p.shape) for p in params if id(p) not in known]
        if outside:
            raise ValueError(
                f"{len(outside)} of the {len(params)} parameters to be added are not in the model of this optimizer, so that nothing would "
                f"average their gradients over the ranks (the first has shape {outside[0]}); give their module an optimizer of its own: "
                "msamp.initialize(module, torch.optim.AdamW(module.parameters()))"
            )
        fresh = any(p.requires_grad and p not in self.grad_sync.names for p in params)
        if fresh:
            self._check_renewal()
        return fresh

    def _check_renewal(self) -> None:
        assert self.grad_sync is not None
        if self.grad_sync.shard:
            raise ValueError(
                "the optimizer is spread over the processes (ZeRO), and its shares are cut for the parameters that wanted a gradient at "
                "msamp.initialize; give initialize zero=False, or unfreeze every parameter to be trained before msamp.initialize and "
                "freeze it again after"
            )
        if self._averaged or not self.grad_sync.idle:
            raise ValueError("gradients of a backward wait for a step; call optimizer.step() or optimizer.zero_grad() first, on every rank")

    def renew_grad_sync(self) -> None:
        """After `requires_grad_(True)` in the middle of a run: average the gradients of every parameter of the model that wants one now.
        Collective; between a step (or `zero_grad`) and the next backward. Without effect on one process.

        Raises:
            ValueError: under ZeRO, for gradients that wait for a step, and where the ranks' models differ. Nothing has changed then.
        """
        if self.grad_sync is None:
            return
        self._check_renewal()
        old, model = self.grad_sync, self.grad_sync.model()
        if model is None:
            raise ValueError("the model of this optimizer is gone; keep a reference to it as long as it is trained")
        formats: dict[torch.Tensor, Format] = {p: parameter_formats(p, self.recipe).grad for p in model.parameters()}
        whole = [p for g in self.param_groups for p, own in zip(g["params"], formats_of(g), strict=True) if update_of(own).whole]
        self.grad_sync = grad_sync(model, formats, old.peers.group, whole=whole, accumulate=self.recipe.accumulator)
        self.grad_sync.steps = old.steps  # the hooks of `old` refer to it weakly, and it goes

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that share the scales of casts; None where there is one."""
        return None if self.grad_sync is None else self.grad_sync.peers.group

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For all micro-batches of a step but the last. On one process gradients accumulate in the parameters' dtype and none is cast to
        FP8; on several they accumulate in the recipe's accumulator and none is sent."""
        return self.casts.paused() if self.grad_sync is None else self.grad_sync.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Gradients that have left for the other processes are dropped too. If no step has taken the gradients, their amaxes
        do not enter the histories of the casts (`ScalingState.abandon`). Collective where a backward has run since."""
        synchronized = [p.grad for p in self._params() if p.grad is not None] if self._averaged else []
        finite = self._untaken() if self.grad_sync is None else self.grad_sync.discard()
        if finite is not None and synchronized:  # `synchronize` has taken them away from grad_sync
            finite = finite & squares_are_finite(synchronized, finite.device)
        if finite is not None:
            self.scaling.abandon(finite)
        super().zero_grad(set_to_none)
        self._averaged = False
        self._taken()

    def _untaken(self) -> torch.Tensor | None:
        """Bool 0-dim, whether a step could have taken the gradients; None where one has taken them all: a gradient that a backward has made
        or changed since does not have the mark of `_taken`."""
        if all(_is_taken(p) for p in self._params()):
            return None
        ready = self.shard.ready(self._whole())
        return self.norm_of(ready).float().square().isfinite()

    def _taken(self, those: Sequence[bool] | None = None) -> None:
        """Mark the gradients that are there, or `those`, by their version: they are a step's, or were zeroed, and not of a backward since.
        The mark is on the tensor, since another one may have its address later."""
        if self.grad_sync is None:
            for p, chosen in zip(params := self._params(), [True] * len(params) if those is None else those, strict=True):
                g = gradient(p)
                if chosen and g is not None:
                    setattr(local(g), _MARK, _version(g))

    def synchronize(self) -> None:
        """Between the last backward of a step and `step`: bring the gradients' average over the processes into `p.grad`, in the dtype of
        the parameter, where torch's `clip_grad_norm_` and other code that looks at gradients finds it. Collective; without effect on one
        process.

        Raises:
            ValueError: under ZeRO, where each process has the averages of its own share alone.
        """
        if self.grad_sync is None:
            return
        if self.grad_sync.shard:
            raise ValueError(
                "the optimizer is spread over the processes (ZeRO), and each has the averaged gradients of its own share alone; clip with "
                "msamp.clip_grad_norm_ or msamp.initialize(..., clip_grad=1.0), or give initialize zero=False"
            )
        self._average()
        for p in self.grad_sync.names:
            average: torch.Tensor | None = p.main_grad  # type: ignore[attr-defined]
            if average is not None:
                p.grad, p.main_grad = average if average.dtype == p.dtype else average.to(p.dtype), None  # type: ignore[attr-defined]

    def _average(self) -> None:
        if self.grad_sync is not None and not self._averaged:
            self.grad_sync.finish()
            self._averaged = True

    def clip(self, params: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the average of some parameters' gradients: what `clip_grad_norm_` does on several processes. Collective."""
        self._average()
        if self.shard.ranks == 1:
            return clip_([g for g in map(gradient, params) if g is not None], max_norm)
        chosen = set(params)
        ready = [holding for holding in self.shard.ready(self._whole()) if holding.param in chosen]
        norm = self.norm_of(ready)
        coefficient = clip_coefficient(norm, max_norm)
        # Pieces of one tensor share the memory of its scale.
        found = [each.grad for each in ready if each.grad is not None]
        for g in {(g.scale_inv if isinstance(g, ScalingTensor) else g).data_ptr(): g for g in found}.values():
            g.mul_(coefficient)
        return norm

    def ready(self) -> list[Holding]:
        """As FP8AdamW's, with the gradients' average over the processes. Collective."""
        self._average()
        return super().ready()

    def _tell_of_clipping(self) -> None:
        assert self.grad_sync is not None
        if self.clip_grad is None and not self._averaged and not self._told and self.grad_sync.peers.rank == 0:
            warnings.warn(
                f"the gradients of {self.grad_sync.peers.ranks} processes are averaged in step(), and before it p.grad is None: a "
                "clip_grad_norm_ of torch there would clip nothing. To clip, give msamp.initialize(..., clip_grad=1.0), call "
                "msamp.clip_grad_norm_, or call optimizer.synchronize() before torch's; clip_grad=float('inf') says that nothing is to "
                "be clipped",
                stacklevel=5,
            )
        self._told = True

    def update(self) -> None:
        """The gradients' average over the processes, FP8AdamW's update, and the next scales of the casts."""
        if self.grad_sync is not None:
            self._tell_of_clipping()
        self._average()
        self._attach_casts()  # a parameter may have been unfrozen
        given = self.loss_scale
        self.loss_scale = self._loss_scale()
        try:
            super().update()
        finally:
            self.loss_scale = given
        self.scaling.roll(self.group, self.usable)
        if self.shard.ranks == 1:  # else weights are still on their way, or FSDP measures rows
            self.scaling.measure_weights()
        if self.grad_sync is not None:
            self.grad_sync.decided(self.usable)
            self.grad_sync.clear()
            for p in self.grad_sync.names:
                p.grad = None  # where synchronize has put an average, to which the next backward would add
            self._averaged = False
        self._taken()

    def _loss_scale(self) -> LossScale | None:
        """The loss scale of this step: GradScaler's where it calls, else one's own."""
        factor = getattr(self, "grad_scale", None)
        if factor is None:
            return self.loss_scale
        if self.loss_scale is not None:
            raise ValueError("the optimizer has a loss_scale and GradScaler scales the loss too; take one of the two")
        return GradScale(factor)

    def decide(self, ready: Sequence[Holding]) -> GradientDecision:
        """As FP8AdamW's; a step in which torch's GradScaler has found an overflow, on any process, is not usable either."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return super().decide(ready)
        if not isinstance(found, torch.Tensor):  # a sum over no gradients
            if self.grad_sync is not None:
                raise ValueError(
                    "GradScaler has seen no gradient: on several processes p.grad is None until the average is there; call "
                    "optimizer.synchronize() before scaler.unscale_(optimizer) or scaler.step(optimizer)"
                )
            found = torch.tensor(float(found), dtype=torch.float32, device="cpu")
        decision = super().decide(ready)
        found = found.to(decision.usable.device, torch.float32, copy=True)
        if self.group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return replace(decision, usable=decision.usable & (found == 0))

    def state_dict(self) -> dict[str, Any]:
        """As FP8AdamW's; COAT's payloads have names of their own (`msamp.optim.foreign_states`)."""
        packed = super().state_dict()
        return {**packed, "state": packed_names(packed["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As FP8AdamW's; states of torch's AdamW, Adam, SGD and Muon and of other recipes are taken over in this optimizer's formats."""
        super().load_state_dict(in_own_formats(self, {**state_dict, "state": unpacked_names(state_dict["state"])}))

    def __getstate__(self) -> dict[str, Any]:
        if self.grad_sync is not None:
            raise ValueError(
                "an optimizer of several processes cannot be copied or pickled, since the synchroniser of its gradients hangs on the "
                "parameters of its model; save state_dict(), or build the copy's own with msamp.initialize and load it there"
            )
        own = {"recipe": self.recipe, "scaling": self.scaling, "grad_sync": None, "taken": [_is_taken(p) for p in self._params()]}
        return {**super().__getstate__(), **own}


def _is_taken(p: torch.Tensor) -> bool:
    """Whether a parameter has no gradient that no step has taken."""
    g = gradient(p)
    return g is None or getattr(local(g), _MARK, None) == _version(g)


def _version(g: torch.Tensor) -> int:
    g = local(g)
    return (g.payload if isinstance(g, ScalingTensor) else g)._version


def optimizers_of(params: Iterable[torch.Tensor]) -> "list[LoopOptimizer]":
    """The optimizers of `msamp.initialize` that hold one of the parameters."""
    asked = {id(p) for p in params}
    return [each for each in _LIVE if each.live and any(id(p) in asked for group in each.param_groups for p in group["params"])]


def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, for plain and FP8 gradients together, on any number of processes.

    Where the parameters' optimizer averages gradients over several processes, the average is clipped, and the call is collective.

    The coefficient folds into an FP8 gradient's scale_inv, so clipping rounds no element of it.

    Args:
        parameters: one or several.
        max_norm: above 0.
        norm_type: 2.

    Returns:
        The norm before clipping, FP64 0-dim, the same on all processes.

    Raises:
        ValueError: for a `max_norm` that is not positive, another norm, or parameters of several optimizers that average apart.
    """
    if norm_type != 2:
        raise ValueError(f"norm_type is {norm_type}; it must be 2: for another call optimizer.synchronize() and torch's clip_grad_norm_")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    owners = [each for each in optimizers_of(params) if each.group is not None]
    if len(owners) > 1:
        raise ValueError(f"the parameters belong to {len(owners)} optimizers that average gradients apart; clip each one's by themselves")
    if owners:
        return owners[0].clip(params, max_norm)
    return clip_([g for g in map(gradient, params) if g is not None], max_norm)
