"""The optimizer: AdamW whose master weight, gradient and moments each have their own storage format (FP8-LM section 2.2, Table 6).

The arithmetic is AdamW's in FP32. Only what is stored between steps has fewer bits (`msamp.optim.updates` has SGD, Muon and Collage too):

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Why these formats at O2? m takes E4M3, because its direction matters more than its magnitude. v takes scaled FP16, because squaring g
doubles the range in powers of two. The master takes scaled FP16, so that an update far below the weight is not lost. Weight, gradient, m
and v then take 2 + 1 + 1 + 2 bytes per parameter, against 18 for BF16 training with FP32 master, gradient and moments.

A step has four parts, none of which makes the host wait:

1. `decision.measure` reads amax and norm of all gradients; `KeptAmaxes` remembers the amaxes of the stored states.
2. `decision.decide` combines the norm over all processes, computes the clip coefficient and decides whether to take the step.
3. The scale of each new state follows from a bound that is known before its values are, so no second pass is needed.
4. `update_batches` groups tensors of the same formats; the update runs each group in one launch.

Next: `updates.adamw` has the update, `states` the formats in memory, `shard` the interface that ZeRO implements.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from msamp.kernels.reference.adamw import GRAD
from msamp.kernels.tables import Tables
from msamp.numerics.formats import FP32, by_name
from msamp.numerics.pickled_float8 import packed, unpacked
from msamp.numerics.recipe import O2, StateFormats
from msamp.numerics.tensor import ScalingTensor, contiguous
from msamp.optim import updates
from msamp.optim.clip import check_max_norm
from msamp.optim.decision import GradientDecision, LossScale, decide, measure, weight_scale_invs
from msamp.optim.device_copy import DeviceCopy
from msamp.optim.masters import follow_states_, version_of
from msamp.optim.shard import Holding, Shard
from msamp.optim.states import begun, check_state, copy_of_rows, give_keys, is_own_master, local, parameter_names, saved_states
from msamp.optim.update_batches import KeptAmaxes, update_batches
from msamp.optim.updates import StepInputs, Update, UpdateBatch, formats_of, named_formats, take_options, updates_of


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """An optimizer with low-precision states: AdamW (with FP32 formats, torch.optim.AdamW bit for bit), or the update that `formats` names.

    The gradient is `p.main_grad` if a synchronizer has set it (in any format), else `p.grad`.

    Scales follow from bounds: m's from beta1 amax_m + (1 - beta1) amax_g, v's likewise with squares, the master's from twice its amax, the
    weight's from that amax and Adam's largest step. COAT's moments (`formats.COAT_E4M3`, `COAT_E5M2`) store the exact maximum and range of
    each group. A weight that has a separate master is cast from the stored master. A step with a non-finite gradient is skipped, counted in
    `skipped_steps`, and does not advance the bias correction.

    State of a parameter: `step` (FP32, on its device), `exp_avg`, `exp_avg_sq`, for COAT's moments also `_max` and `_k` of each, and
    `master` unless the parameter itself is stored in the master's format. Other updates have other states (`msamp.optim.updates`):
    Collage's keep `weight_remainder` and `exp_avg_sq_remainder`, the second components of pairs.

    On a GPU with Triton a step is a few launches over all tensors, one per combination of formats. They read and write each element once,
    and measure the amaxes for the next step's bounds. Elsewhere, and for non-contiguous weights, the reference twin runs (one host sync,
    FP32 temporaries). Only the first step waits for the host. A CUDA graph may contain a step if gradients keep their memory and `refresh`
    runs before each replay; capture again after `load_state_dict`, `restart`, or loading weights alone.

    When anything else writes a weight (`model.load_state_dict`, `copy_`, whatever changes its version), its master follows at the next step
    (`msamp.optim.masters`), so model and optimizer can be loaded in either order. `reload_model_params` also finds writes through `.data`.

    A plain FP16 parameter has a separate FP32 master and requires a loss scale. The optimizer divides the loss scale out of the gradients
    together with the clipping; norms and amaxes are taken from the unscaled gradients.

    Args:
        params: parameters or groups. A group may have its own `formats` (StateFormats, or a list of one per parameter) and `decoupled`.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; other updates have no betas, and Muon has its own eps.
        formats: of master, gradient, m and v. `step` quantizes a plain gradient to its format just in time.
        decoupled: False adds the weight decay to the gradient, as Adam's L2 penalty.
        clip_grad: clip the global gradient norm to this; None does not clip.
        combine_norms: FP64 [parameters], the gradient norms of this process's parameters -> the global norm, FP64 0-dim, the same on all
            processes that share a model.
        loss_scale: the loss scale in the gradients; it is notified after every step whether it overflowed. None: gradients are unscaled.
        shard: which part of the parameters this process updates and how it agrees with others, such as `ZeRO`; by default everything.
        seed: of stochastic rounding, if the formats use it. A group may have `keys`, one per parameter
            (`numerics.stochastic_rounding.tensor_key`); by default they follow from the seed and the parameters' names, or their positions
            if the groups have no names. `state_dict` contains them, and loading one restores its keys.
        options: of the update that `formats` names, such as `momentum=0.9` (see `Update.options` for names and defaults).

    Raises:
        ValueError: a number out of range, or a parameter or formats that the update or the shard does not support.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float = 1e-2,
        *,
        formats: StateFormats = O2.states,
        decoupled: bool = True,
        clip_grad: float | None = None,
        combine_norms: Callable[[torch.Tensor], torch.Tensor] = torch.linalg.vector_norm,
        loss_scale: LossScale | None = None,
        shard: Shard | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if clip_grad is not None:
            check_max_norm(clip_grad)
        self.clip_grad = clip_grad
        self.combine_norms = combine_norms
        self.loss_scale = loss_scale
        self.seed = seed
        self.shard: Shard = Shard() if shard is None else shard
        self._norm = torch.zeros((), dtype=torch.float64, device="cpu")
        self._skips = torch.zeros((), dtype=torch.int64, device="cpu")
        self._usable = torch.ones((), dtype=torch.bool, device="cpu")
        update = updates.by_name(formats.update)
        given = {name: value for name, value in {"betas": betas, "eps": eps, **options}.items() if value is not None}
        own = update.options() | given
        if own.keys() != update.options().keys():
            raise ValueError(
                f"update {update.name!r} takes the options {', '.join(update.options())}, got {', '.join(given)}; remove the others"
            )
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "decoupled": decoupled, "formats": formats, **own})
        self._forget()

    def _forget(self) -> None:
        """Drop all caches: tables on the device, amaxes of the stored states."""
        self._tables: Tables | None = None
        self._kept = KeptAmaxes()
        self._grad_amaxes = torch.zeros(0, dtype=torch.float32, device="cpu")
        self._cast: dict[torch.Tensor, tuple[int, ...]] = {}  # versions of weights when they were last cast from their masters

    @property
    def grad_norm(self) -> torch.Tensor:
        """FP64 0-dim norm of the last step's (quantized) gradients, before clipping."""
        return self._norm.clone()

    @property
    def grad_amaxes(self) -> torch.Tensor:
        """FP32 [parameters, group by group]: amaxes of the last step's gradients; non-finite for a non-finite gradient, 0 without a
        gradient. The next step writes to the same memory."""
        return self._grad_amaxes

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far; reading it waits for the device."""
        return int(self._skips)

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skips.fill_(count)

    @property
    def usable(self) -> torch.Tensor:
        """Bool 0-dim on the device: whether the last step was taken. The same on all processes, and always in the same memory after the
        first step on that device."""
        return self._usable

    def skipped(self) -> bool | DeviceCopy:
        """Whether the last step was skipped. On a GPU this is an asynchronous flag, so that a caller who reads it later need not wait."""
        return DeviceCopy(~self._usable) if self._usable.is_cuda else not bool(self._usable)

    def refresh(self, *, weights: bool = True) -> None:
        """Prepare the replay of a CUDA graph that contains a step: send changed learning rates and weight decays to the device, and update
        the masters of weights that were written from outside, unless the caller knows that there are none (`weights=False`)."""
        for group in self.param_groups:
            for update in updates_of(group):
                self._hyper(group, update)
        held = [holding for holding in self.holdings() if self.state.get(holding.weight)] if weights else []
        self._follow(held)
        self._kept.take(held, self.state, self.batches)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and check its hyperparameters. The group keeps only the options of its own updates."""
        params = param_group["params"]
        if not isinstance(params, torch.Tensor | set):  # torch rejects a set, whose order is undefined
            param_group["params"] = params = list(params)
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        param_group["formats"] = named_formats(param_group.get("formats", self.defaults["formats"]), len(listed))
        foreign = take_options(param_group, self.defaults)
        for p, formats in zip(listed, formats_of({"params": listed, "formats": param_group["formats"]}), strict=True):
            update, master = updates.update_of(formats), formats["master"]
            update.check_group(formats, param_group.get("decoupled", self.defaults["decoupled"]))
            dtype = p[1].dtype if isinstance(p, tuple) else p.dtype
            if dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"a parameter is {dtype}; the optimizer supports torch.float32, torch.bfloat16, torch.float16 and ScalingTensor: "
                    "convert the model"
                )
            if dtype == torch.float16 and master != FP32.name:
                raise ValueError(
                    f"a parameter is torch.float16 and its master {master}; FP16 without a scale requires an fp32 master (recipe "
                    "fp16-amp): use these formats, or convert the model"
                )
            update.check_parameter(p[1] if isinstance(p, tuple) else p)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in foreign:
            del group[name]
        try:
            give_keys(group, len(self.param_groups) - 1, self.seed)
            self.shard.check(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        own = ("clip_grad", "combine_norms", "loss_scale", "seed", "shard", "_norm", "_skips", "_usable")
        return {**packed(super().__getstate__()), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(unpacked(state))
        self._forget()

    def init_masters(self, initial: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Initialize masters from pairs (parameter, its values before FP8 rounding); a parameter that is its own master is skipped."""
        held: dict[int, list[Holding]] = {id(p): [] for p in self._params()}
        for holding in self.holdings():
            held[id(holding.param)].append(holding)
        for p, values in initial:
            if id(p) not in held:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is not in this optimizer; add its group first")
            for holding in held[id(p)]:
                if not is_own_master(p, by_name(holding.formats["master"])):
                    self._init_state(holding, values)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Update the masters of weights that other code wrote, including writes that change no version, such as those through the `.data`
        of a plain parameter. A step handles all other writes without this call. The name is Megatron's."""
        self.wait()
        self._kept.forget()
        self._cast = {}
        self._follow([holding for holding in self.holdings() if self.state.get(holding.weight)])

    def _follow(self, holdings: Sequence[Holding]) -> None:
        """Rebuild the masters of weights that are no longer what their master casts to."""
        for holding in holdings:
            version = version_of(holding.param)
            if self._cast.get(holding.weight) != version:
                state = self.state.get(holding.weight, {})
                for declared, fmt in updates.kept_states(holding.param, holding.formats) if state else ():
                    if declared.copy and declared.key not in state:  # the weight was its own master until model.bfloat16()
                        state[declared.key] = holding.master(fmt, None)
                follow_states_(state, holding.as_written(), holding.whole)
            self._cast[holding.weight] = version

    def _init_state(self, holding: Holding, values: torch.Tensor | None = None) -> None:
        state = self.state[holding.weight]
        state["step"] = torch.zeros((), device=holding.weight.device, dtype=torch.float32)
        for declared, fmt in updates.kept_states(holding.param, holding.formats):
            if declared.copy:
                # From the whole parameter, so that its scale does not depend on how it is cut.
                state[declared.key] = holding.master(fmt, values)
                self._cast[holding.weight] = version_of(holding.param)
            else:
                state |= begun(declared.key, fmt, holding.weight)

    def _whole(self) -> list[Holding]:
        zipped = ((group, zip(group["params"], formats_of(group), group["keys"], strict=True)) for group in self.param_groups)
        entries = enumerate((group, *own) for group, members in zipped for own in members)
        return [Holding(p, group, formats, index, p, place=index, key=key) for index, (group, p, formats, key) in entries]

    def holdings(self) -> list[Holding]:
        """Return what this process updates, in parameter order."""
        return self.shard.holdings(self._whole())

    def ready(self) -> list[Holding]:
        """Return the holdings that have a gradient in this step, with that gradient. Wait for weights that are still being gathered, and
        update the masters of weights that were written from outside."""
        self.wait()
        ready = self.shard.ready(self._whole())
        self._follow(ready)
        return ready

    def wait(self) -> None:
        """Make the compute stream wait for all weights that are still being gathered (under ZeRO, on a GPU)."""
        self.shard.wait()

    @torch._disable_dynamo  # a graph break in a compiled training step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient, or none at all if a gradient is not finite."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.update()
        torch.clear_autocast_cache()  # or plain layers go on with casts of the old weights, in one autocast block around several steps
        return loss

    def update(self) -> None:
        """Do the work of `step` once the gradients are available. Call `step` instead: it also runs torch's step hooks."""
        ready = self.ready()
        fresh = [holding for holding in ready if not self.state.get(holding.weight)]
        for holding in fresh:
            self._init_state(holding)
        decision = self.decide(ready)
        norm, usable, grad_amaxes = decision.norm, decision.usable, decision.amaxes[GRAD]
        # Always in the same memory: every captured graph writes there.
        self._norm = self._norm.to(norm.device).copy_(norm)
        self._usable = self._usable.to(norm.device).copy_(usable)
        self._skips = self._skips.to(norm.device).add_(~usable)
        if self._grad_amaxes.shape != grad_amaxes.shape or self._grad_amaxes.device != grad_amaxes.device:
            self._grad_amaxes = torch.zeros_like(grad_amaxes)
        self._grad_amaxes.copy_(grad_amaxes)
        if self.loss_scale is not None:
            self._grad_amaxes.div_(self.loss_scale.scale(grad_amaxes.device))
            self.loss_scale.update(~usable)
        # On a GPU the kernels read the flag. Under ZeRO every rank must join the all-gather, even if it updates nothing.
        if usable.is_cuda or usable:
            scale_invs = {}
            if self.shard.ranks > 1:
                scale_invs = weight_scale_invs(self._whole(), decision.amaxes, self._usable, self._table(), self._hyper)
            inputs = StepInputs(decision.amaxes, self._kept.table, decision.coefficient, self._usable)
            for batch in self.batches(ready):
                batch.update.run(self._table(), batch, inputs)
            self.shard.send_weights(scale_invs)
            self._written(ready)
        if fresh and not usable:
            for holding in fresh:  # a skipped step creates no state
                del self.state[holding.weight]

    def decide(self, ready: Sequence[Holding]) -> GradientDecision:
        """Return the norm, clip coefficient and verdict for the gradients of `ready` (from `self.ready`, all with states). Collective under
        ZeRO; changes no weight and no state."""
        rows = max(updates.update_of(whole.formats).master_row for whole in self._whole())
        kept = functools.partial(self._kept.of, states=self.state, batches=self.batches, tables=self._table(), rows=rows)
        measured = measure(ready, self._params(), self._table(), self.shard, kept, self.combine_norms)
        return decide(measured, clip_grad=self.clip_grad, loss_scale=self.loss_scale)

    def norm_of(self, ready: Sequence[Holding]) -> torch.Tensor:
        """Return the FP64 0-dim norm of the gradients of `ready` before clipping, as in a step; collective under ZeRO."""
        return measure(ready, self._params(), self._table(), self.shard, None, self.combine_norms).norm

    def batches(self, holdings: Sequence[Holding]) -> Iterator[UpdateBatch]:
        """See `update_batches`; the holdings must have states."""
        return update_batches(holdings, self.state, self._hyper)

    def replayed(self) -> None:
        """Do the host's part of `step` after a CUDA graph that contains a step has been replayed."""
        self._written([holding for holding in self.holdings() if self.state.get(holding.weight)])

    def _written(self, holdings: Sequence[Holding]) -> None:
        """Increment the versions of the weights, since torch does not see kernels write, and cached FP8 scales are keyed by version."""
        torch.autograd.graph.increment_version([p.payload if isinstance(p, ScalingTensor) else p for p in map(local, self._params())])
        self._kept.written(holdings, self.state)
        self._cast |= {holding.weight: version_of(holding.param) for holding in holdings}

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _table(self) -> Tables:
        device = next(p for group in self.param_groups for p in group["params"]).device
        if self._tables is None or self._tables.device != device:
            self._tables = Tables(device)
        return self._tables

    def _hyper(self, group: Mapping[str, Any], update: Update) -> torch.Tensor:
        """FP64 on the device: the hyperparameters of a group that an update reads."""
        updates.check_options(group)  # a loop may have set one by hand
        number = next(i for i, own in enumerate(self.param_groups) if own is group)
        return self._table().send(("hyper", number, update.name), update.numbers(group), torch.float64)

    def state_dict(self, *, everywhere: bool = False) -> dict[str, Any]:
        """Return torch's state dict. Under ZeRO it is collective and gathers the state of the whole optimizer, tensor by tensor.

        The group's first rank (`everywhere`: each rank) gets it, on the CPU; elsewhere "state" is empty. Load the first's on every rank.
        """
        self.wait()
        if type(self.shard) is Shard:
            return super().state_dict()
        own_state, self.state = self.state, defaultdict(dict)
        try:
            packed = super().state_dict()
        finally:
            self.state = own_state
        packed["state"] = self.shard.gather(self._whole(), self.state, everywhere=everywhere)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load copies of states in the precision in which they were saved (torch's own would cast them to the parameter's dtype).

        Rounding modes and the keys of stochastic rounding are loaded like learning rates, so the next step equals the saved run's, bit
        for bit. States saved before stochastic rounding existed keep nearest rounding.

        Raises:
            ValueError: if the saved states do not match this optimizer: names or number of parameters, states, shapes, formats, or values
                that a state cannot hold. Nothing has changed then.
        """
        state_dict = dict(state_dict)
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = change(self, state_dict) or state_dict
        self._load(state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """Do the work of `load_state_dict`, without torch's hooks."""
        states, names = saved_states(self, state_dict, "formats"), parameter_names(self)
        for whole in self._whole():
            if whole.index in states:
                check_state(names[whole.index], states[whole.index], updates.expected_states(whole.param, whole.formats, whole.param.shape))
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            updates.check_options({**group, **saved})
            for update in updates_of(group):
                update.check_numbers({**group, **saved})
        self._forget()
        for number, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=True)):
            params, kept = group["params"], {key: group[key] for key in ("param_names",) if key in group}
            group.clear()  # but the same dict, which schedulers may hold
            group.update(copy.deepcopy({**saved, **kept, "params": []}), params=params)
            group["formats"] = named_formats(group["formats"], len(group["params"]))
            give_keys(group, number, self.seed)
        own = {}
        for holding in self.holdings():
            if holding.index in states:
                rows, kept = holding.rows or slice(None), states[holding.index]
                own[holding.place] = {key: value if key == "step" else copy_of_rows(value, rows) for key, value in kept.items()}
        self._take(own)

    def take_states(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Replace all states by `states`, keyed by the `place` of this process's holdings, in this optimizer's formats and on any device.
        States that are missing from a holding are initialized.

        Raises:
            ValueError: if a state is unknown to this optimizer, has another shape or format, or has values that it cannot hold. Nothing has
                changed then.
        """
        names = parameter_names(self)
        for holding in self.holdings():
            expected = updates.expected_states(holding.param, holding.formats, holding.weight.shape)
            check_state(names[holding.index], states.get(holding.place, {}), expected, whole=False)
        self._take(states)

    def _take(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        self.state.clear()
        self._kept.forget()
        for holding in self.holdings():
            given, device = states.get(holding.place, {}), holding.weight.device
            if given and "step" not in given:
                self._init_state(holding)
            for key, value in given.items():
                taken = value.to(device, torch.float32, copy=True).view(()) if key == "step" else contiguous(value.to(device))
                self.state[holding.weight][key] = taken
        self._cast = {}


FP8AdamW = LowPrecisionOptimizer  # alias: the name from when AdamW was its only update
