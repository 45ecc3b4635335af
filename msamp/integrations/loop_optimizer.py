"""The optimizer for a user's own loop: a LowPrecisionOptimizer whose step also averages the gradients and rolls the scales of the casts.

Both are part of the object rather than hooks, which torch drops from copies and pickles. A (model, optimizer) pair that is copied together
continues training like the original. On several processes the optimizer cannot be copied, since the gradient synchronizer is attached to
the model's parameters.
"""

import contextlib
import logging
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from msamp.comm.accumulate import squares_are_finite
from msamp.comm.grad_sync import GradSync
from msamp.kernels.tables import Tables
from msamp.nn import layer_gains
from msamp.nn.layer_gains import check_layers
from msamp.nn.scaling_state import ScalingState
from msamp.numerics.formats import FP32, Format
from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.recipe import FP32_STATES, Recipe, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import clip_, clip_coefficient
from msamp.optim.decision import GradientDecision, GradScale
from msamp.optim.foreign_states import in_own_formats, packed_names, unpacked_names
from msamp.optim.grad_cast import BackwardCasts
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.shard import Holding, Shard, gradient
from msamp.optim.states import local, parameter_kind, weight_format
from msamp.optim.updates import formats_of, update_of
from msamp.parallel.data_parallel import grad_sync
from msamp.parallel.greedy_zero import ZeRO

_MARK = "_msamp_taken"  # attribute of a gradient
_ON_FIRST_RANK = "states_on_first_rank"  # a key of the state dicts of other ranks under ZeRO
_IN_BF16 = "layers_in_bf16"  # a key of state dicts, for `in_bf16`
_LOG = logging.getLogger("msamp")

_LIVE: "weakref.WeakSet[LoopOptimizer]" = weakref.WeakSet()  # where clipping and hosts find an optimizer by its parameters


def parameter_formats(p: torch.Tensor, recipe: Recipe, update: str | None = None) -> StateFormats:
    """Return the formats of gradient, master and moments of a converted model's parameter, and its update, by default the recipe's.

    A plain FP32 parameter is its own master, whatever the recipe's format: a narrower copy would take more memory and have less precision.
    """
    states = recipe.formats_of(parameter_kind(p))
    if weight_format(p) == FP32:
        states = states.varied(master=FP32)
    return states if update is None else states.varied(update=update)


class _States(defaultdict[Any, Any]):
    """States that count as initialized, so that torch.distributed.checkpoint does not run a step to initialize them: ranks would cast
    weights anew that FSDP2 pads, and others not."""

    def __bool__(self) -> bool:
        return True


class LoopOptimizer(LowPrecisionOptimizer):
    """The optimizer that `msamp.initialize` returns.

    A step that is skipped, because of a non-finite gradient or by torch's GradScaler, does not change the amax histories and scales of the
    casts. GradScaler calls `step` every time, with `grad_scale` and `found_inf` set (its protocol for fused optimizers,
    `torch.amp.grad_scaler.GradScaler.step`), and the device decides. A loop that skips a step itself must call this optimizer's
    `zero_grad`; the model's `zero_grad` cannot handle the amaxes (`ScalingState.abandon`).

    A group without `formats`, also one added later, gets the recipe's formats for each of its parameters, and the default update,
    independently of other groups.

    Args:
        params: parameters or groups of a converted model.
        recipe: defines the formats.
        scaling: the scales of the model's linear layers, which a step rolls.
        grad_sync: averages gradients over several processes; None on one.
        settings: other arguments of LowPrecisionOptimizer; of `formats` only the update is used, by default the recipe's.

    Attributes:
        grad_sync: as given.
        casts: of gradients to FP8 during backward, on one process.
        fp8_min_gain: as in `msamp.initialize`.
        in_bf16: name of each linear layer that computes in BF16 since FP8 gains nothing -> the reason; None before the first step.
    """

    _step_supports_amp_scaling = True  # read by GradScaler
    _clip_tables: Tables | None = None
    _averaged = False  # whether gradients were averaged since the last step
    _complete = False  # whether p.grad is there for every average
    _gathered: dict[torch.Tensor, torch.Tensor] | None = None  # averages of whole parameters under ZeRO, for who uses p.grad
    fp8_min_gain = 0.0
    in_bf16: dict[str, str] | None = None
    live = True  # until another optimizer of `msamp.initialize` replaces it

    def __init__(
        self, params: Iterable[Any], recipe: Recipe, scaling: ScalingState, grad_sync: GradSync | None = None, **settings: Any
    ) -> None:
        self.recipe, self.scaling, self.grad_sync, self.casts = recipe, scaling, grad_sync, BackwardCasts()
        super().__init__(params, **settings)
        self.state = _States(dict, self.state)
        self._show_averages()
        _LIVE.add(self)
        self._attach_casts()
        self.scaling.compute_in_bf16({})  # what an earlier optimizer's first step decided

    def __setstate__(self, state: dict[str, Any]) -> None:
        taken = state.pop("taken", None)  # missing when torch's load_state_dict calls this, which does not change the gradients
        finite = state.pop("untaken", None)
        super().__setstate__(state)
        if "casts" not in vars(self):
            self.casts = BackwardCasts()
        self._attach_casts()
        if taken is not None:
            self._taken(taken)  # a gradient that was copied has its own version
        if finite is not None and all(gradient(p) is None for p in self._params()):
            self.scaling.abandon(finite)  # the copy of a parameter has no gradient, so that no step will use these
        _LIVE.add(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the base class's, with the recipe's formats if the group has none, and names if the other groups have them.

        On several processes the call is collective if a parameter newly requires a gradient, such as one that was frozen before: its
        gradients are averaged from then on (`renew_grad_sync`).

        Raises:
            ValueError: on several processes, if a parameter is not in the model, or as in `renew_grad_sync`. The optimizer has not changed
                then.
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

    def _show_averages(self) -> None:
        if self.grad_sync is not None and self.grad_sync.visible is not None:
            # A weak reference: `p.grad` leads here, where the collector does not find a cycle.
            self.grad_sync.visible.average_of = weakref.WeakMethod(self.average_of)

    def _attach_casts(self) -> None:
        """Cast gradients during backward if this process has whole gradients and no synchronizer takes them."""
        if self.live and self.grad_sync is None and type(self.shard) is Shard:
            self.casts.attach(pair for group in self.param_groups for pair in zip(group["params"], formats_of(group), strict=True))

    def _unaveraged(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether the synchronizer must be rebuilt for new parameters; ValueError if it cannot be."""
        if self.grad_sync is None:
            return False
        model = self.grad_sync.model()
        known = {id(p) for p in model.parameters()} if model is not None else set()
        outside = [tuple(p.shape) for p in params if id(p) not in known]
        if outside:
            raise ValueError(
                f"{len(outside)} of the {len(params)} new parameters are not in this optimizer's model, so their gradients would not be "
                f"averaged over the ranks (the first has shape {outside[0]}); create a separate optimizer for their module: "
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
                "the optimizer is sharded (ZeRO) for the parameters that required a gradient at msamp.initialize; pass zero=False to "
                "initialize, or unfreeze every parameter to be trained before msamp.initialize and freeze it again afterwards"
            )
        if self._averaged or not self.grad_sync.idle:
            raise ValueError("there are gradients of a backward; call optimizer.step() or optimizer.zero_grad() first, on every rank")

    def renew_grad_sync(self) -> None:
        """Include all parameters that require a gradient now in the averaging. Call it after `requires_grad_(True)` during a run, between a
        step (or `zero_grad`) and the next backward. Collective; without effect on one process.

        Raises:
            ValueError: under ZeRO, if there are gradients of a backward, or if the ranks' models differ. Nothing has changed then.
        """
        if self.grad_sync is None:
            return
        self._check_renewal()
        old, model = self.grad_sync, self.grad_sync.model()
        if model is None:
            raise ValueError("the model of this optimizer no longer exists; keep a reference to it while it is trained")
        formats: dict[torch.Tensor, Format] = {p: parameter_formats(p, self.recipe).grad for p in model.parameters()}
        whole = [p for g in self.param_groups for p, own in zip(g["params"], formats_of(g), strict=True) if update_of(own).whole]
        self.grad_sync = grad_sync(model, formats, old.peers.group, whole=whole, accumulate=self.recipe.accumulator)
        self.grad_sync.steps = old.steps  # the hooks of `old` reference it weakly, so it is freed
        self._show_averages()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that share the scales of casts; None for one process."""
        return None if self.grad_sync is None else self.grad_sync.peers.group

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context for all micro-batches of a step but the last. On one process, gradients accumulate in the parameters' dtype and none is
        cast to FP8; on several, they accumulate in the recipe's accumulator and none is sent."""
        return self.casts.paused() if self.grad_sync is None else self.grad_sync.no_sync()

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like torch's, but also drop gradients that were already sent to other processes. If no step used the gradients, their amaxes are
        not recorded as usual (`ScalingState.abandon`). Collective if a backward has run since the last step."""
        synchronized = [p.grad for p in self._params() if isinstance(p.grad, FP8Gradient) and p.grad.fetched] if self._averaged else []
        finite = self._untaken() if self.grad_sync is None else self.grad_sync.discard()
        if finite is not None and synchronized:  # `average_of` removed them from grad_sync
            finite = finite & squares_are_finite([g.held for g in synchronized], finite.device)
        if finite is not None:
            self.scaling.abandon(finite)
        super().zero_grad(set_to_none)
        self._averaged = self._complete = False
        self._gathered = None
        self._taken()

    def _untaken(self) -> torch.Tensor | None:
        """Return bool 0-dim, whether a step could have used the unused gradients; None if a step used them all. A gradient that a backward
        created or changed since then does not have the mark of `_taken`."""
        if all(_is_taken(p) for p in self._params()):
            return None
        return self.norm_of(self.shard.ready(self._whole())).float().square().isfinite()

    def _taken(self, those: Sequence[bool] | None = None) -> None:
        """Mark the existing gradients, or `those`, with their version: a step used them, or they were zeroed. The mark is an attribute of
        the tensor, since another tensor may get its address later."""
        if self.grad_sync is None:
            for p, chosen in zip(params := self._params(), [True] * len(params) if those is None else those, strict=True):
                g = gradient(p)
                if chosen and g is not None:
                    setattr(local(g), _MARK, _version(g))

    def synchronize(self) -> None:
        """Average the gradients over the processes now, and put the averages into `p.grad`, in the dtype of the parameter. Call it between
        the last backward of a step and `step`. Collective; without effect on one process.

        Using `p.grad` does so too. This call is for parameters that a process's micro-batch did not use, so that `p.grad` is None there,
        and under ZeRO for code that uses `p.grad` on one process only.
        """
        if self.grad_sync is None or self.grad_sync.visible is None:
            return
        self._average()
        for p in self._unseen():
            self.grad_sync.visible.put(p)
        self._complete = True
        if isinstance(self.shard, ZeRO) and self._gathered is None:
            self._gathered = self.shard.gather_averages()

    def average_of(self, p: torch.Tensor) -> torch.Tensor:
        """Return the average of a parameter's gradient for who uses `p.grad`, which is the gradient of the step from then on.

        Raises:
            ValueError: if this rank has no gradient of some parameter and others have one: the loop may have passed over it.
        """
        assert self.grad_sync is not None
        self._average()
        unseen = [] if self._complete else self._unseen()
        if unseen:
            raise ValueError(
                f"rank {self.grad_sync.peers.rank} has no gradient of {self.grad_sync.names[unseen[0]]}, and other ranks have one, so code "
                "that uses p.grad would do different things on them; call optimizer.synchronize() on every rank after the last backward"
            )
        if isinstance(self.shard, ZeRO):
            if self._gathered is None:
                self._gathered = self.shard.gather_averages()
            average = self._gathered.pop(p)
        else:
            average, p.main_grad = p.main_grad, None  # type: ignore[attr-defined]
        return average if average.dtype == p.dtype else average.to(p.dtype)

    def _unseen(self) -> list[torch.Tensor]:
        """Return the parameters with an average and no gradient on this rank."""
        assert self.grad_sync is not None
        assert self.grad_sync.visible is not None
        return [p for bucket in self.grad_sync.buckets for p in bucket.present() if p not in self.grad_sync.visible]

    def _average(self) -> None:
        if self.grad_sync is not None and not self._averaged:
            self.grad_sync.finish()
            self._averaged = True

    def _average_and_edits(self) -> None:
        """Average the gradients, and let what the loop did to `p.grad` be the gradients of the step."""
        self._average()
        if self.grad_sync is None or self.grad_sync.visible is None:
            return
        visible = self.grad_sync.visible
        for p, seen in visible.changes():
            if not isinstance(self.shard, ZeRO):
                p.main_grad = None  # type: ignore[attr-defined]
                continue
            self.shard.replace_average(p, seen.held if isinstance(seen, FP8Gradient) else seen)
            visible.lift(p)
            if seen is not None:  # who uses it again gathers it again
                visible.put(p)
            self._gathered = None

    def clip(self, params: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the averages of some parameters' gradients, for `clip_grad_norm_` on several processes. Collective."""
        self._average_and_edits()
        if self.shard.ranks == 1:
            device = params[0].device if params else torch.device("cpu")
            if self._clip_tables is None or self._clip_tables.device != device:
                self._clip_tables = Tables(device)
            return clip_([g for g in map(gradient, params) if g is not None], max_norm, self._clip_tables)
        chosen = set(params)
        ready = [holding for holding in self.shard.ready(self._whole()) if holding.param in chosen]
        norm = self.norm_of(ready)
        coefficient = clip_coefficient(norm, max_norm)
        # Pieces of one tensor share its scale's memory.
        gradients = [holding.grad for holding in ready if holding.grad is not None]
        for g in {(g.scale_inv if isinstance(g, ScalingTensor) else g).data_ptr(): g for g in gradients}.values():
            g.mul_(coefficient)
        return norm

    def ready(self) -> list[Holding]:
        """Like the base class's, with the gradients' average over the processes. Collective."""
        self._average_and_edits()
        return super().ready()

    def update(self) -> None:
        """Average the gradients over the processes, run the base class's update, and compute the next scales of the casts."""
        self._attach_casts()  # a parameter may have been unfrozen
        given, factor = self.loss_scale, getattr(self, "grad_scale", None)
        if factor is not None and given is not None:
            raise ValueError("the optimizer has a loss_scale, and GradScaler scales the loss too; use one of the two")
        self.loss_scale = given if factor is None else GradScale(factor)
        try:
            super().update()
        finally:
            self.loss_scale = given
        self.scaling.roll(self.group, self.usable)
        if self.fp8_min_gain and self.in_bf16 is None:
            self._decide_layers()
        if self.shard.ranks == 1:  # otherwise weights are still being gathered, or FSDP measures rows
            self.scaling.measure_weights()
        if self.grad_sync is not None:
            self.grad_sync.decided(self.usable)
            self.grad_sync.clear()
            for p in self.grad_sync.names:
                p.grad = None  # an average that was used, to which the next backward would add
            self._averaged = self._complete = False
            self._gathered = None
        self._taken()

    def _decide_layers(self) -> None:
        """Let linear layers that gain nothing in FP8 compute in BF16 after the first step, as the first process decides. Collective."""
        decided: list[Any] = [None]
        if self.group is None or dist.get_rank(self.group) == 0:
            decided = [layer_gains.decide(self.scaling, self.recipe, self.fp8_min_gain, layer_gains.default_measure())]
            _LOG.info("%s", decided[0][1])
        if self.group is not None:
            dist.broadcast_object_list(decided, dist.get_global_rank(self.group, 0), self.group)
        self.in_bf16 = decided[0][0]
        self.scaling.compute_in_bf16(self.in_bf16)

    def decide(self, ready: Sequence[Holding]) -> GradientDecision:
        """Like the base class's; a step is also not usable if torch's GradScaler found an overflow on any process."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return super().decide(ready)
        if not isinstance(found_inf, torch.Tensor):  # a sum over no gradients
            found_inf = torch.tensor(float(found_inf), dtype=torch.float32, device="cpu")
        decision = super().decide(ready)
        found_inf = found_inf.to(decision.usable.device, torch.float32, copy=True)
        if self.group is not None:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, self.group)
        return replace(decision, usable=decision.usable & (found_inf == 0))

    def state_dict(self, *, everywhere: bool = False) -> dict[str, Any]:
        """Like the base class's; COAT's payloads have separate keys (`msamp.optim.foreign_states`). For torch.distributed.checkpoint's
        `get_state_dict`, which requires it, every rank gets the states of all parameters, which begin here if there are none yet.
        """
        distributed = sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        if distributed:
            if self.in_bf16:
                _LOG.warning("get_state_dict leaves out which layers are in BF16: a run that loads it starts in FP8 and times them again")
            for holding in self.holdings():
                if not self.state.get(holding.weight):
                    self._init_state(holding)
        packed = super().state_dict(everywhere=everywhere or distributed)
        elsewhere = {_ON_FIRST_RANK: True} if any(self.state.values()) and not packed["state"] else {}
        wide = {_IN_BF16: self.in_bf16} if self.in_bf16 else {}
        return {**packed, **elsewhere, **wide, "state": packed_names(packed["state"])}

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """Like the base class's; states of torch's AdamW, Adam, SGD and Muon and of other recipes are converted to its formats. With an
        `fp8_min_gain`, the layers that computed in BF16 do so again; ValueError for one that this model does not have.
        """
        wide = state_dict.get(_IN_BF16) if self.fp8_min_gain else None
        check_layers(wide, self.scaling.linears)
        if state_dict.get(_ON_FIRST_RANK):
            raise ValueError(
                "this state dict has no states, since under ZeRO only the group's first rank returns them; load the first rank's on "
                "every rank"
            )
        super()._load(in_own_formats(self, {**state_dict, "state": unpacked_names(state_dict["state"])}))
        if wide is not None:
            self.in_bf16 = dict(wide)
            self.scaling.compute_in_bf16(self.in_bf16)

    def __getstate__(self) -> dict[str, Any]:
        if self.grad_sync is not None:
            raise ValueError(
                "an optimizer of several processes cannot be copied or pickled, since its gradient synchronizer is attached to the "
                "model's parameters; save state_dict(), and load it into an optimizer that msamp.initialize returns for the copy"
            )
        own = {name: getattr(self, name) for name in ("recipe", "scaling", "fp8_min_gain", "in_bf16")}
        taken = {"taken": [_is_taken(p) for p in self._params()], "untaken": self._untaken()}
        return {**super().__getstate__(), **own, "grad_sync": None, **taken}


def _is_taken(p: torch.Tensor) -> bool:
    """Whether a parameter has no unused gradient."""
    g = gradient(p)
    return g is None or getattr(local(g), _MARK, None) == _version(g)


def _version(g: torch.Tensor) -> int:
    g = local(g)
    return (g.payload if isinstance(g, ScalingTensor) else g)._version


def optimizers_of(params: Iterable[torch.Tensor]) -> "list[LoopOptimizer]":
    """Return the optimizers of `msamp.initialize` that have one of the parameters."""
    asked = {id(p) for p in params}
    return [known for known in _LIVE if known.live and any(id(p) in asked for group in known.param_groups for p in group["params"])]
