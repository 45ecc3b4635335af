"""FP8 AdamW: AdamW with a format of its own for each of master weight, gradient and moments (FP8-LM section 2.2, Table 6).

What: the update of AdamW in FP32, on states that are stored in fewer bits:

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Each state has the shape of its parameter. A step loads the states to FP32, computes, and stores them again; the update of w uses m and v
before they are rounded.

Why these formats (O2): m is E4M3, since its direction matters more than its magnitude. v is FP16 with a scale, since the square of g
doubles the range in powers of two. The master is FP16 with a scale, since an update far below the weight must not vanish (Table 6).
Weight, gradient, m and v take 2 + 1 + 1 + 2 bytes, against 18 of BF16 with FP32 masters, gradients and moments.

A step in four: read amax and norm of all gradients; agree on the norm and the clip coefficient; bound each new state to choose its scale;
update all tensors in few launches. A gradient that is not finite changes nothing; the device decides, and the host does not wait.

What was tried: a scale taken from the new values needs a second pass over them. A bound of the new values needs none
(`msamp.optim.updates`). Other updates, such as Collage's in BF16, enter there too.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from msamp.kernels.reference.adamw import GRAD
from msamp.kernels.tables import Tables
from msamp.numerics.formats import FP32, Format, by_name
from msamp.numerics.recipe import O2, StateFormats
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.numerics.tensor import ScalingTensor
from msamp.optim import updates
from msamp.optim.clip import (
    check_max_norm,
    clip_coefficient,
    contiguous,
    first_pass,
    norms_from_square_sums,
    scaled_first,
    second_pass,
    units,
)
from msamp.optim.decision import Decision, LossScale
from msamp.optim.device_flag import DeviceFlag
from msamp.optim.kept_states import expected_states, kept_states, named_by_variant, update_of
from msamp.optim.masters import follow_states_, version_of
from msamp.optim.shard import Holding, Shard, Whole
from msamp.optim.states import (
    as_stored,
    begun,
    check_state,
    copy_of_rows,
    give_keys,
    is_own_master,
    is_scaled,
    local,
    make_master,
    parameter_names,
    payload,
    saved_states,
    scale_inv,
    take_groups,
    weight_format,
)
from msamp.optim.updates import MASTER, StepInputs, UpdateBatch, formats_of, named_formats, take_options, updates_of

SCALE_INV = -1  # row of the table of amaxes: the gradient's scale_inv


class FP8AdamW(torch.optim.Optimizer):
    """AdamW with states in low precision; with FP32 formats, torch.optim.AdamW bit for bit.

    A gradient is `p.main_grad` where a synchroniser has put one (in any format), else `p.grad`.

    Each step loads to FP32, updates in FP32 from the unquantised new moments and stores. Scales come from bounds that
    hold before the values are known: m from beta1 amax_m + (1 - beta1) amax_g, v likewise with squares, master and
    weight from twice the master's amax. COAT's moments (`formats.COAT_E4M3`, `COAT_E5M2`) are stored with the maximum and the range of
    each group as they are. A weight with a master beside it is cast from the master as stored. A step with a
    gradient that is not finite is skipped, counted in `skipped_steps`, and does not advance the bias correction.

    State of a parameter: `step` (FP32, on the parameter's device), `exp_avg`, `exp_avg_sq`, of COAT's moments also
    their `_max` and `_k`, and `master` where the parameter is not itself stored in the master's format. `formats.update` names another
    update than AdamW's in FP32, with states of its own (`msamp.optim.updates`): Collage's, all in BF16, keep `weight_remainder` and
    `exp_avg_sq_remainder`, the second components of pairs.

    On a GPU with Triton a step is a few launches over all tensors, one a combination of formats, which read and write
    each element once and take the amaxes that the next step's bounds need; elsewhere, and for weights that are not
    contiguous, the reference twin (one host sync, FP32 temporaries). No step but the first waits for the host, and a
    CUDA graph may hold one: gradients must keep their memory, `refresh` goes before a replay, and after `load_state_dict`,
    `restart` or weights loaded by themselves it must be captured anew.

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
        self._kept = torch.zeros(0)
        self._grad_amaxes = torch.zeros(0)
        self._seen: dict[torch.Tensor, tuple[int, ...]] = {}
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
        for number, group in enumerate(self.param_groups):
            for update in updates_of(group):
                self._hyper(number, update.name)
        held = [holding for holding in self.holdings() if self.state.get(holding.weight)]
        self._follow(held)
        if self._kept.dim() == 2:
            self._keep_amaxes(held)

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
        self._seen, self._cast = {}, {}

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Let masters follow weights that somebody has written, now, and find writes that no version tells of, such as those through the
        `.data` of a plain parameter (Megatron's name). A step does it by itself for all others."""
        self.wait()
        self._seen, self._cast = {}, {}
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
        state["step"] = torch.zeros((), device=holding.weight.device)
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

    def pieces(self) -> list[Holding]:
        """Deprecated: `holdings`. Gone in the next version."""
        warnings.warn("FP8AdamW.pieces is now FP8AdamW.holdings, and will go", DeprecationWarning, stacklevel=2)
        return self.holdings()

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
            scale_invs = self._new_scale_invs(decision.amaxes) if self.shard.ranks > 1 else {}
            inputs = StepInputs(decision.amaxes, self._kept, decision.coefficient, self._usable)
            for batch in self.batches(ready):
                batch.update.run(self._table(), batch, inputs)
            self.shard.send_weights(scale_invs)
            self._written(ready)
        if fresh and not usable:
            for holding in fresh:  # a skipped step leaves no trace
                del self.state[holding.weight]

    def decide(self, ready: Sequence[Holding]) -> Decision:
        """What the gradients of `ready` (as `self.ready` gives them, all with states) come to; collective under ZeRO. Changes no weight and
        no state."""
        table, sums = self._measure(ready)
        norm, coefficient = self._combined_norm(ready, table, sums), None
        if self.loss_scale is not None:
            coefficient = self.loss_scale.scale(norm.device).reciprocal()
            norm = norm * coefficient
        if self.clip_grad is not None:
            clip = clip_coefficient(norm, self.clip_grad)
            coefficient = clip if coefficient is None else clip * coefficient
        # A gradient with a square beyond FP32 would leave the second moment without a bound; clipping brings it back in range.
        usable = norm.isfinite() if self.clip_grad is not None else norm.float().square().isfinite()
        return Decision(table, norm, coefficient, usable)

    def replayed(self) -> None:
        """After a replay of a CUDA graph that holds a step: what `step` does on the host once the device has been told."""
        self._written([holding for holding in self.holdings() if self.state.get(holding.weight)])

    def _written(self, holdings: Sequence[Holding]) -> None:
        """Kernels write behind torch's back: the version of a weight, by which its FP8 scale is kept, has to change."""
        torch.autograd.graph.increment_version([p.payload if isinstance(p, ScalingTensor) else p for p in map(local, self._params())])
        self._seen |= {holding.weight: self._signature(holding) for holding in holdings}
        self._cast |= {holding.weight: version_of(holding.param) for holding in holdings}

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _table(self) -> Tables:
        device = self.param_groups[0]["params"][0].device
        if self._tables is None or self._tables.device != device:
            self._tables = Tables(device)
        return self._tables

    def _hyper(self, number: int, update: str) -> torch.Tensor:
        """FP64 on the device: the numbers of a group that an update asks for."""
        return self._table().send(("hyper", number, update), updates.by_name(update).numbers(self.param_groups[number]), torch.float64)

    def _signature(self, holding: Holding) -> tuple[int, ...]:
        """Changes when other code changes a tensor with a kept amax."""
        state = self.state[holding.weight]
        kept = [state[key] for key in update_of(holding.formats).kept]
        return version_of(holding.param, *kept, state.get(MASTER.key, holding.param))

    def _measure(self, ready: Sequence[Holding], *, bounds: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """What the bounds and the norm need before anything is updated; with `bounds` False, what the norm needs alone.

        Returns:
            FP32 [rows, parameters]: the amaxes of a `Decision`, or of it the first row and the last.
            int64 [parameters, 2]: sums of squares of this process's scaled gradients.
        """
        tables, count = self._table(), len(self._params())
        gs, (scaled, plain) = self._sorted_gradients(ready)
        ordered = [ready[i] for i in scaled + plain]
        kept = self._kept_of(ordered) if bounds else torch.zeros(0, len(ordered), device=tables.device)
        table = torch.zeros(len(kept) + 2, count, device=tables.device)
        sums = torch.zeros(count, 2, dtype=torch.int64, device=tables.device)
        if ready:
            stats, found = first_pass(tables, gs[: len(scaled)], gs[len(scaled) :])
            index = tables.send("indices", [holding.index for holding in ordered])
            table.scatter_reduce_(1, index.expand(len(table), -1), torch.cat([stats[:1], kept, stats[1:]]), "amax")
            sums.index_add_(0, index[: len(scaled)], found)
        return self.shard.largest(table), sums

    def _kept_of(self, ready: Sequence[Holding]) -> torch.Tensor:
        """FP32 [rows, ready]: the amaxes as stored that are kept."""
        tables, rows = self._table(), max(update_of(whole.formats).master_row for whole in self._whole())
        size = 1 + max((holding.place for holding in ready), default=-1)
        if self._kept.dim() != 2 or self._kept.shape[0] != rows or self._kept.shape[1] < size or self._kept.device != tables.device:
            self._kept, self._seen = torch.zeros(rows, size, device=tables.device), {}
        self._keep_amaxes(ready)
        return self._kept.index_select(1, tables.send("places", [holding.place for holding in ready]))

    def _keep_amaxes(self, holdings: Sequence[Holding]) -> None:
        """Take the amaxes as stored of what somebody else has changed."""
        stale = [holding for holding in holdings if self._seen.get(holding.weight) != self._signature(holding)]
        for batch in self.batches(stale):
            self._kept[: batch.update.master_row, batch.places] = batch.update.stored_amaxes(batch)

    @staticmethod
    def _sorted_gradients(ready: Sequence[Holding]) -> tuple[list[torch.Tensor], tuple[list[int], list[int]]]:
        """The gradients, scaled ones first; the places in `ready` of the scaled and of the plain ones."""
        gs = [holding.grad for holding in ready if holding.grad is not None]
        scaled, plain = scaled_first(gs)
        return [gs[i] for i in scaled + plain], (scaled, plain)

    def _combined_norm(self, ready: Sequence[Holding], table: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """FP64 0-dim norm of all gradients, whichever process holds them."""
        tables = self._table()
        gs, (scaled, plain) = self._sorted_gradients(ready)
        if plain:
            index = tables.send("indices of plain", [ready[i].index for i in plain])
            numels = [ready[i].param.numel() for i in plain]
            sums.index_add_(0, index, second_pass(tables, gs[len(scaled) :], table[GRAD, index], numels))
        plain_units = tables.send("units", [float(units(p.numel())) for p in self._params()], torch.float64)
        return self.combine_norms(norms_from_square_sums(self.shard.total(sums), table[GRAD], table[SCALE_INV], plain_units))

    def _new_scale_invs(self, amaxes: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
        """The scale_inv that each scaled weight has after this step, as its owner computes it (`store_`)."""
        alike: dict[tuple[Format, int], list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        for whole in self._whole():
            last = scale_inv(whole.param)
            if last is not None:
                kind = weight_format(whole.param), update_of(whole.formats).master_row
                alike.setdefault(kind, []).append((whole.index, whole.param, last))
        found: dict[torch.Tensor, torch.Tensor] = {}
        for (fmt, row), members in alike.items():
            indices, params, scale_invs = (list(column) for column in zip(*members, strict=True))
            last = torch.stack(scale_invs)
            index = self._table().send(("weights", fmt, row), indices)
            new = inverse(scale_from_amax(2.0 * amaxes[row][index], fmt.max, inverse(last)))
            found |= zip(params, torch.where(self._usable, new, last).unbind(), strict=True)
        return found

    def batches(self, ready: Sequence[Holding]) -> Iterator[UpdateBatch]:
        """Holdings that are updated together. They have states, and all or none have a gradient; they are of one group, and their
        tensors have the same formats and are all laid out by rows, or none is."""
        numbers = {id(group): number for number, group in enumerate(self.param_groups)}
        alike: dict[tuple[Any, ...], list[Holding]] = {}
        for holding in ready:
            own = MASTER.key not in self.state[holding.weight]
            stored = _dtype(holding.grad), None if own else _dtype(holding.weight)
            kind = (numbers[id(holding.group)], holding.weight.is_contiguous(), *stored, *holding.formats.values())
            alike.setdefault(kind, []).append(holding)
        for (number, by_rows, _, own_format, *_), members in alike.items():
            held = [self.state[holding.weight] for holding in members]
            weights, beside = [holding.weight for holding in members], own_format is not None
            formats, update = members[0].formats, update_of(members[0].formats)
            keys = [declared.key for declared in update.states if declared != MASTER]
            yield UpdateBatch(
                update=update,
                group=members[0].group,
                formats=formats,
                hyper=self._hyper(number, formats["update"]),
                by_rows=by_rows,
                grads=[holding.grad for holding in members if holding.grad is not None],
                masters=[state[MASTER.key] for state in held] if beside else weights,
                weights=weights if beside else [],
                states={key: [as_stored(state, key) for state in held] for key in keys},
                steps=[state["step"] for state in held],
                indices=[holding.index for holding in members],
                places=[holding.place for holding in members],
                keys=[holding.key for holding in members],
                offsets=[holding.offset for holding in members],
            )

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
        state_dict = named_by_variant(state_dict)
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


def _dtype(x: torch.Tensor | None) -> tuple[torch.dtype, bool] | None:
    """In what a tensor is stored, and whether with a scale; None of none."""
    return None if x is None else (payload(x).dtype, is_scaled(x))
