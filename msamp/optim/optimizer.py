"""The optimizer: masters, gradients and moments each in a format of its own (FP8-LM section 2.2, Table 6).

What: the update of AdamW in FP32, on states that are stored in fewer bits (other updates, such as SGD's and Collage's, enter by
`msamp.optim.updates`):

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Why these formats (O2): m is E4M3, since its direction matters more than its magnitude. v is FP16 with a scale, since the square of g
doubles the range in powers of two. The master is FP16 with a scale, since an update far below the weight must not vanish (Table 6).
Weight, gradient, m and v take 2 + 1 + 1 + 2 bytes, against 18 of BF16 with FP32 masters, gradients and moments.

How, in four steps, each of which does not wait for the host:

1. `decision.measure` reads amax and norm of all gradients; `KeptAmaxes` has those of the states as they were last stored.
2. `decision.decide` takes the norm of all processes to a clip coefficient, and decides whether the step is taken.
3. Each new state's scale follows from a bound that holds before its values are known, so that no second pass is needed.
4. `update_batches` groups tensors of one format, and their update runs each group in one launch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from msamp.kernels.reference.adamw import GRAD
from msamp.kernels.tables import Tables
from msamp.numerics.formats import FP32, by_name
from msamp.numerics.recipe import O2, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim import updates
from msamp.optim.clip import check_max_norm, contiguous
from msamp.optim.decision import GradientDecision, LossScale, Measured, decide, measure, weight_scale_invs
from msamp.optim.device_flag import DeviceFlag
from msamp.optim.kept_amaxes import KeptAmaxes
from msamp.optim.kept_states import expected_states, kept_states, update_of
from msamp.optim.masters import follow_states_, version_of
from msamp.optim.shard import Holding, Shard, Whole
from msamp.optim.states import (
    begun,
    check_state,
    copy_of_rows,
    give_keys,
    is_own_master,
    local,
    make_master,
    parameter_names,
    saved_states,
    take_groups,
)
from msamp.optim.update_batches import update_batches
from msamp.optim.updates import StepInputs, Update, UpdateBatch, formats_of, named_formats, take_options, updates_of


class LowPrecisionOptimizer(torch.optim.Optimizer):
    """An optimizer with states in low precision: AdamW (with FP32 formats torch.optim.AdamW bit for bit), or another update by its name.

    A gradient is `p.main_grad` where a synchroniser has put one (in any format), else `p.grad`.

    Scales come from bounds: m from beta1 amax_m + (1 - beta1) amax_g, v likewise with squares, master and weight from twice the master's
    amax. COAT's moments (`formats.COAT_E4M3`, `COAT_E5M2`) are stored with the maximum and the range of each group as they are. A weight
    with a master beside it is cast from the master as stored. A step with a gradient that is not finite is skipped, counted in
    `skipped_steps`, and does not advance the bias correction.

    State of a parameter: `step` (FP32, on its device), `exp_avg`, `exp_avg_sq`, of COAT's moments also their `_max` and `_k`, and `master`
    where the parameter is not itself stored in the master's format. `formats.update` names another update than AdamW's in FP32, with states
    of its own (`msamp.optim.updates`): Collage's keep `weight_remainder` and `exp_avg_sq_remainder`, the second components of pairs.

    On a GPU with Triton a step is a few launches over all tensors, one a combination of formats, which read and write each element once and
    take the amaxes that the next step's bounds need; elsewhere, and for weights that are not contiguous, the reference twin (one host sync,
    FP32 temporaries). No step but the first waits for the host, and a CUDA graph may hold one: gradients must keep their memory, `refresh`
    goes before a replay, and after `load_state_dict`, `restart` or weights loaded by themselves it must be captured anew.

    A master follows a weight that somebody else has written, by `model.load_state_dict`, `copy_` or whatever moves its version, at the next
    step (`msamp.optim.masters`); model and optimizer can be loaded in either order. `reload_model_params` finds writes through `.data` too.

    A plain FP16 parameter has an FP32 master beside it, and wants a loss scale, which is divided out of its gradients together
    with the clipping; norms and amaxes are those of the unscaled gradients.

    Args:
        params: parameters or groups. A group may carry its own `formats` (StateFormats, or a list with one for each parameter) and
            `decoupled`.
        lr, betas, eps, weight_decay: as torch.optim.AdamW; other updates have no betas, and Muon an eps of its own.
        formats: master, gradient, m and v. A plain gradient is quantised to its format just-in-time in `step`.
        decoupled: False takes Adam's L2 decay in the gradient.
        clip_grad: clip the global gradient norm to this; None does not clip.
        combine_norms: FP64 [parameters], the gradient norms of this process's parameters -> the global norm, FP64 0-dim, the same
            on all processes that must decide alike, where a model is spread over several.
        loss_scale: by what the gradients are too large; told of every step whether it overflowed. None: they are as they should be.
        shard: what of the parameters this process updates, and how it agrees with others, such as a `ZeRO`; by default everything.
        seed: of stochastic rounding, where the formats ask for it. A group may have `keys`, one for each parameter
            (`numerics.stochastic_rounding.tensor_key`); by default they follow from the seed and the parameters' names, or their places in
            groups without names. They are saved in `state_dict`, and a loaded one brings its own.
        options: of another update that `formats` names, such as `momentum=0.9` (`Update.options` has them with their defaults).

    Raises:
        ValueError: for a number out of range, and for a parameter or formats that the update or the shard does not take.
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
        self.shard: Shard = Whole() if shard is None else shard
        self._norm = torch.zeros((), dtype=torch.float64)
        self._skips = torch.zeros((), dtype=torch.int64)
        self._usable = torch.ones((), dtype=torch.bool)
        update = updates.by_name(formats.update)
        given = {name: value for name, value in {"betas": betas, "eps": eps, **options}.items() if value is not None}
        own = update.options() | given
        if own.keys() != update.options().keys():
            raise ValueError(
                f"update {update.name!r} takes {', '.join(update.options())}, and {', '.join(given)} are given; leave out others"
            )
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "decoupled": decoupled, "formats": formats, **own})
        self._forget()

    def _forget(self) -> None:
        """Drop what is only remembered: tables on the device, amaxes as stored."""
        self._tables: Tables | None = None
        self._kept = KeptAmaxes()
        self._grad_amaxes = torch.zeros(0, dtype=torch.float32)
        self._cast: dict[torch.Tensor, tuple[int, ...]] = {}  # weights as they were last known to be cast from their masters

    @property
    def grad_norm(self) -> torch.Tensor:
        """FP64 0-dim norm of the last step's (quantised) gradients, before clipping."""
        return self._norm.clone()

    @property
    def grad_amaxes(self) -> torch.Tensor:
        """FP32 [parameters, group by group]: largest magnitudes of the last step's gradients, not finite where one is not; 0 without
        one. The next step writes in the same memory."""
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
        """Bool 0-dim on the device, whether the last step was taken; alike on all processes, and always the same memory once there was a
        step on that device."""
        return self._usable

    def skipped(self) -> bool | DeviceFlag:
        """Whether the last step was skipped: on a GPU as a flag on its way, so that a caller a little later need not wait."""
        return DeviceFlag(~self._usable) if self._usable.is_cuda else not bool(self._usable)

    def refresh(self) -> None:
        """Before a replay of a CUDA graph that holds a step: send learning rates and weight decays that have changed to the device, and let
        masters follow weights that somebody has written."""
        for group in self.param_groups:
            for update in updates_of(group):
                self._hyper(group, update)
        held = [holding for holding in self.holdings() if self.state.get(holding.weight)]
        self._follow(held)
        self._kept.take(held, self.state, self.batches)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch; refuses hyper-parameters out of range, naming value and range. The group has the options of its own updates alone."""
        params = param_group["params"]
        if not isinstance(params, torch.Tensor | set):  # a set is torch's to refuse: its order is not sure
            param_group["params"] = params = list(params)
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        param_group["formats"] = named_formats(param_group.get("formats", self.defaults["formats"]), len(listed))
        foreign = take_options(param_group, self.defaults)
        for p, formats in zip(listed, formats_of({"params": listed, "formats": param_group["formats"]}), strict=True):
            update, master = update_of(formats), formats["master"]
            update.check_group(formats, param_group.get("decoupled", self.defaults["decoupled"]))
            dtype = p[1].dtype if isinstance(p, tuple) else p.dtype
            if dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"a parameter is {dtype}; the optimizer takes torch.float32, torch.bfloat16, torch.float16 and ScalingTensors: "
                    "convert the model"
                )
            if dtype == torch.float16 and master != FP32.name:
                raise ValueError(
                    f"a parameter is torch.float16 and its master {master}; FP16 without a scale takes an fp32 master (recipe fp16-amp): "
                    "give these formats, or convert the model"
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
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def init_master(self, p: torch.Tensor, values: torch.Tensor) -> None:
        """Start the master of `p` from `values`: what `p` was before it was rounded to FP8. No effect where `p` is its own master."""
        if not any(q is p for group in self.param_groups for q in group["params"]):
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is not in this optimizer; add its group first")
        for holding in self.holdings():
            if holding.param is p and not is_own_master(p, by_name(holding.formats["master"])):
                self._init_state(holding, values)

    def restart(self) -> None:
        """Start all masters and moments anew from the parameters as they are: where the moments of before mean nothing to new weights."""
        self.state.clear()
        self._kept.forget()
        self._cast = {}

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Let masters follow weights that somebody has written, now, and find writes that no version tells of, such as those through the
        `.data` of a plain parameter (Megatron's name). A step does it by itself for all others."""
        self.wait()
        self._kept.forget()
        self._cast = {}
        self._follow([holding for holding in self.holdings() if self.state.get(holding.weight)])

    def _follow(self, holdings: Sequence[Holding]) -> None:
        """Make masters anew where their weights are no longer what they cast to."""
        for holding in holdings:
            version = version_of(holding.param)
            if self._cast.get(holding.weight) != version:
                follow_states_(self.state.get(holding.weight, {}), holding.as_written(), holding.param)
            self._cast[holding.weight] = version

    def _init_state(self, holding: Holding, values: torch.Tensor | None = None) -> None:
        state = self.state[holding.weight]
        state["step"] = torch.zeros((), device=holding.weight.device, dtype=torch.float32)
        for declared, fmt in kept_states(holding.param, holding.formats):
            if declared.copy:
                # From the whole parameter, so that its scale does not depend on how it is cut.
                state[declared.key] = holding.copy_of(make_master(holding.param, fmt, values))
                self._cast[holding.weight] = version_of(holding.param)
            else:
                state |= begun(declared.key, fmt, holding.weight)

    def _whole(self) -> list[Holding]:
        each = [
            (p, group, formats, key)
            for group in self.param_groups
            for p, formats, key in zip(group["params"], formats_of(group), group["keys"], strict=True)
        ]
        return [Holding(p, group, formats, index, p, place=index, key=key) for index, (p, group, formats, key) in enumerate(each)]

    def holdings(self) -> list[Holding]:
        """What this process updates, in parameter order."""
        return self.shard.holdings(self._whole())

    def ready(self) -> list[Holding]:
        """Those with a gradient in this step, which they carry in its format; waits for weights that are still on their way, and lets
        masters follow those that somebody has written."""
        self.wait()
        ready = self.shard.ready(self._whole())
        self._follow(ready)
        return ready

    def wait(self) -> None:
        """Let the compute stream wait for all weights that are still on their way (under ZeRO, on a GPU)."""
        self.shard.wait()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient, or none at all where a gradient is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    def update(self) -> None:
        """What `step` does once the gradients are there: not to be called by itself, which would pass over the hooks of a step."""
        ready = self.ready()
        fresh = [holding for holding in ready if not self.state.get(holding.weight)]
        for holding in fresh:
            self._init_state(holding)
        decision = self.decide(ready)
        norm, usable, grad_amaxes = decision.norm, decision.usable, decision.amaxes[GRAD]
        # Always in the same memory: a graph writes there, whichever of several is replayed.
        self._norm = self._norm.to(norm.device).copy_(norm)
        self._usable = self._usable.to(norm.device).copy_(usable)
        self._skips = self._skips.to(norm.device).add_(~usable)
        if self._grad_amaxes.shape != grad_amaxes.shape or self._grad_amaxes.device != grad_amaxes.device:
            self._grad_amaxes = torch.zeros_like(grad_amaxes)
        self._grad_amaxes.copy_(grad_amaxes)
        if self.loss_scale is not None:
            self._grad_amaxes.div_(self.loss_scale.scale(grad_amaxes.device))
            self.loss_scale.update(~usable)
        # On a GPU the kernels look at the flag, and under ZeRO every rank must come to the gathering, whatever it has to update.
        if usable.is_cuda or usable:
            scale_invs = weight_scale_invs(self._whole(), decision.amaxes, self._usable, self._table()) if self.shard.ranks > 1 else {}
            inputs = StepInputs(decision.amaxes, self._kept.table, decision.coefficient, self._usable)
            for batch in self.batches(ready):
                batch.update.run(self._table(), batch, inputs)
            self.shard.send_weights(scale_invs)
            self._written(ready)
        if fresh and not usable:
            for holding in fresh:  # a skipped step leaves no trace
                del self.state[holding.weight]

    def decide(self, ready: Sequence[Holding]) -> GradientDecision:
        """What the gradients of `ready` (as `self.ready` gives them, all with states) come to; collective under ZeRO. Changes no weight and
        no state."""
        rows = max(update_of(whole.formats).master_row for whole in self._whole())
        measured = self._measure(ready, lambda holdings: self._kept.of(holdings, self.state, self.batches, self._table(), rows))
        return decide(measured, clip_grad=self.clip_grad, loss_scale=self.loss_scale)

    def norm_of(self, ready: Sequence[Holding]) -> torch.Tensor:
        """FP64 0-dim norm of the gradients of `ready`, as a step takes it before clipping; collective under ZeRO."""
        return self._measure(ready, None).norm

    def _measure(self, ready: Sequence[Holding], kept: Callable[[Sequence[Holding]], torch.Tensor] | None) -> Measured:
        return measure(ready, self._params(), self._table(), self.shard, kept, self.combine_norms)

    def batches(self, holdings: Sequence[Holding]) -> Iterator[UpdateBatch]:
        """See `update_batches`; the holdings have states."""
        return update_batches(holdings, self.state, self._hyper)

    def replayed(self) -> None:
        """After a replay of a CUDA graph that holds a step: what `step` does on the host once the device has been told."""
        self._written([holding for holding in self.holdings() if self.state.get(holding.weight)])

    def _written(self, holdings: Sequence[Holding]) -> None:
        """Kernels write behind torch's back: the version of a weight, by which its FP8 scale is kept, has to change."""
        torch.autograd.graph.increment_version([p.payload if isinstance(p, ScalingTensor) else p for p in map(local, self._params())])
        self._kept.written(holdings, self.state)
        self._cast |= {holding.weight: version_of(holding.param) for holding in holdings}

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _table(self) -> Tables:
        device = self.param_groups[0]["params"][0].device
        if self._tables is None or self._tables.device != device:
            self._tables = Tables(device)
        return self._tables

    def _hyper(self, group: Mapping[str, Any], update: Update) -> torch.Tensor:
        """FP64 on the device: the numbers of a group that an update asks for."""
        number = next(i for i, own in enumerate(self.param_groups) if own is group)
        return self._table().send(("hyper", number, update.name), update.numbers(group), torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Under ZeRO the state of the whole optimizer, gathered tensor by tensor; collective.

        The group's first rank has all of it, on the CPU; on the others "state" is empty. Load the first rank's on every rank.
        """
        self.wait()
        if self.shard.ranks == 1:
            return super().state_dict()
        mine, self.state = self.state, defaultdict(dict)
        try:
            packed = super().state_dict()
        finally:
            self.state = mine
        packed["state"] = self.shard.gather(self._whole(), self.state)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load copies of states in the precision in which they were saved (torch's own would cast them to the parameter's dtype).

        Raises:
            ValueError: where what was saved is not what this optimizer keeps of its parameters: their names and number, the states of each,
                shapes, formats, and values that a state cannot hold; nothing has changed then.

        The roundings of masters and moments are those saved, as learning rates are, and so are the keys of stochastic rounding: the next
        step is that of the saved run, bit for bit. States saved before stochastic rounding existed keep nearest rounding.
        """
        states, names = saved_states(self, state_dict, "formats"), parameter_names(self)
        for whole in self._whole():
            if whole.index in states:
                check_state(names[whole.index], states[whole.index], expected_states(whole.param, whole.formats, whole.param.shape))
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for update in updates_of(group):
                update.check_numbers({**group, **saved})
        take_groups(self, state_dict)
        for number, group in enumerate(self.param_groups):
            group["formats"] = named_formats(group["formats"], len(group["params"]))
            give_keys(group, number, self.seed)
        self._take(
            {
                holding.place: {
                    key: value if key == "step" else copy_of_rows(value, holding.rows or slice(None))
                    for key, value in states[holding.index].items()
                }
                for holding in self.holdings()
                if holding.index in states
            }
        )

    def take_states(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Replace all states by those of this process's holdings, by their `place`, in this optimizer's formats and on any device; a
        holding of which only some are given starts the others anew.

        Raises:
            ValueError: for states that this optimizer does not keep, in another shape or format, or with values that they cannot hold;
                nothing has changed then.
        """
        names = parameter_names(self)
        for holding in self.holdings():
            expected = expected_states(holding.param, holding.formats, holding.weight.shape)
            check_state(names[holding.index], states.get(holding.place, {}), expected, whole=False)
        self._take(states)

    def _take(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        self.restart()
        for holding in self.holdings():
            given, device = states.get(holding.place, {}), holding.weight.device
            if given and "step" not in given:
                self._init_state(holding)
            for key, value in given.items():
                taken = value.to(device, torch.float32, copy=True).view(()) if key == "step" else contiguous(value.to(device))
                self.state[holding.weight][key] = taken
        self._cast = {}


FP8AdamW = LowPrecisionOptimizer  # its name while AdamW was its only update
