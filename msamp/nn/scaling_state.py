"""Delayed scaling: the amax histories and scales of a model's FP8 tensors, stored on the device and rolled once per step."""

import weakref
from collections.abc import Mapping
from operator import is_
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from msamp.kernels import ops
from msamp.kernels.scalar_pool import aligned
from msamp.nn.cast_checks import check_buffers, check_device, check_gemm, check_smooth, wire_cast
from msamp.nn.cast_scales import CastScales, RowGroups, Watch, both, own_rule, scales_of_weights
from msamp.nn.channel_scales import AllChannels, ChannelScales, ChannelSlots, ChannelsOfRow, KeepsDtypes
from msamp.numerics.formats import Format
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import Cast, Gemms
from msamp.numerics.scaling import Scaling, inverse
from msamp.numerics.stochastic_rounding import unwrapped
from msamp.numerics.tensor import ScalingTensor

INPUT, GRAD_OUTPUT, WIRE = 0, 1, 2  # rows of a layer's buffers
PRODUCTS = ("output", "grad_input", "grad_weight")  # of a linear layer, as `Gemms` names them


class TensorScales(KeepsDtypes):
    """The scales of some tensors of one layer, one row per tensor.

    Buffers (FP32, saved with the model): `amax` [rows] of the current step, `history` [rows, window], `scale` and `scale_inv` [rows], and
    `seen` (int64), the number of recorded steps, without skipped ones. `window` is the longest of the rows' rules. Until a rule's window is
    full, and for a rule without a window, casts use just-in-time scales.

    Attributes:
        steps: the host's copy of `seen`, at most `window`: never smaller than `seen`, and equal to it when a window may have filled.
        delayed: whether every window is full, so that no cast is just-in-time for lack of history.
        watches: callbacks after the casts of a training step, by row; fused layers compute the values before the cast only for them.
        checks: the same, of `msamp.nn.precision_guard`, which may measure a step that something else watches.
        sums: by who measures, for each product of the layer a tally that compares its sums with exact ones, FP64 [3]
            (`msamp.numerics.accumulation.tally_product_`).
    """

    amax: torch.Tensor
    history: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    seen: torch.Tensor
    steps: int
    delayed: bool
    _filled: tuple[bool, ...]

    def __init__(self, casts: tuple[Cast, ...], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.casts = casts
        self.window = max(cast.scaling.window for cast in casts)
        rows = len(casts)
        self.register_buffer("amax", torch.zeros(rows, device=device, dtype=torch.float32))
        self.register_buffer("history", torch.zeros(rows, self.window, device=device, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(rows, device=device, dtype=torch.float32))
        self.register_buffer("scale_inv", torch.ones(rows, device=device, dtype=torch.float32))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device=device))
        # The host keeps its own count, since reading `seen` would be a sync in every forward. Full windows are separate flags, since
        # torch.compile would compile a new graph for every value of a counter.
        self._count(0)
        self.watches: dict[int, Watch] = {}
        self.checks: dict[int, Watch] = {}
        self.sums: dict[str, Mapping[str, torch.Tensor]] = {}
        self._known_slots: dict[bool, tuple[tuple[bool, ...], tuple[torch.Tensor | None, ...], tuple[CastScales, ...]]] = {}

    @torch.no_grad()
    def reset(self) -> None:
        for name, x in self._buffers.items():
            x.fill_(1 if name.startswith("scale") else 0)  # type: ignore[union-attr]
        self._count(0)

    def _count(self, steps: int) -> None:
        steps = min(steps, self.window)
        filled = tuple(0 < cast.scaling.window <= steps for cast in self.casts)
        own = vars(self)  # Module.__setattr__ would take 8 us per layer and step
        own["steps"], own["delayed"] = steps, 0 < self.window <= steps
        if own.get("_filled") != filled:  # keep the object: `_kept_slots` compares its identity
            own["_filled"] = filled

    @property
    def described(self) -> str:
        """The casts of the rows that every layer of this class has, as text."""
        return ", ".join(str(cast) for cast in self.casts)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The target formats, by row."""
        return tuple(cast.format for cast in self.casts)

    def slots(self, record: bool) -> tuple[CastScales, ...]:
        """Return the slots by row. With `record=False` (evaluation) amaxes are not recorded."""
        slots = self._slots(record) if torch.compiler.is_compiling() else self._kept_slots(record)
        if record and (self.watches or self.checks):
            return tuple(slot._replace(watch=both(self.watches.get(row), self.checks.get(row))) for row, slot in enumerate(slots))
        return slots

    @property
    def tallies(self) -> dict[str, tuple[torch.Tensor, ...]] | None:
        """The tallies of `sums` by product; None without."""
        if not self.sums:
            return None
        return {product: tuple(rows[product] for rows in self.sums.values()) for product in next(iter(self.sums.values()))}

    def _kept_slots(self, record: bool) -> tuple[CastScales, ...]:
        # Cached, since creating each of a layer's six views costs the host 4 us in every forward. The check that they are current is short.
        made_of = tuple(map(self._buffers.__getitem__, ("amax", "scale", "scale_inv")))
        known = self._known_slots.get(record)
        if known is None or known[0] is not self._filled or not all(map(is_, known[1], made_of)):
            with torch.inference_mode(False), torch.no_grad():
                known = self._known_slots[record] = self._filled, made_of, self._slots(record)
        return known[2]

    def _slots(self, record: bool) -> tuple[CastScales, ...]:
        def slot(row: int) -> CastScales:
            amax = self.amax[row] if record and self.casts[row].scaling.window else None
            return CastScales(self.scale[row], self.scale_inv[row], amax) if self._filled[row] else CastScales(None, None, amax)

        return tuple(slot(row) for row in range(len(self.casts)))

    def check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise a ValueError that names the first saved buffer that no run can have written, see `check_buffers`."""
        check_buffers(state, {name: own.dtype for name, own in self._buffers.items() if own is not None}, self.casts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "watches": {}, "checks": {}, "sums": {}, "_known_slots": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"sums": {}} | state)  # models that were pickled before there was a record of sums

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        key = f"{prefix}history"  # accelerate takes empty ones for one tensor of several names, and saves only the first
        history = state_dict.get(key) if self.window else state_dict.setdefault(key, self.history)
        if isinstance(history, torch.Tensor) and history.shape[:1] == self.history.shape[:1] and history.shape != self.history.shape:
            # Saved by a recipe with other windows, whose amaxes cannot be used here: the windows restart.
            state_dict.update(TensorScales(self.casts, self.amax.device).state_dict(prefix=prefix))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if not torch.allclose(self.scale * self.scale_inv, torch.ones_like(self.scale), rtol=2.0**-20, atol=0.0):
            self.seen.zero_()  # an averaged state: the mean of inverses is not the inverse of the mean
        self._count(int(self.seen))


class LinearScaling(TensorScales):
    """The scales of one linear layer: histories of its input (row 0) and grad_output (row 1), and the FP8 scale of its weight.

    Args:
        gemm: the casts of the operands.
        device: of the buffers.
        wire: the format in which tensor-parallel ranks send partial sums of this layer, the input's or the grad_output's. The sums follow
            that format's rule and get row 2. None: there are two rows.
        channels: number of the input's channels that get separate scales (`msamp.nn.channel_scales`); 0: none.

    Attributes:
        channels: their scales, or None.
        raised: whether the layer computes in BF16 for now (`msamp.nn.raised_linear`); `msamp.nn.precision_guard` sets it. No buffer: a
            guard's state has it.
        fusible: `Gemms.fusible`, which takes long enough to show in every forward of a fused layer.
        shape: rows, inputs and outputs of the layer in its first forward in training; None before.
        in_bf16: why the layer computes in BF16 for good (`msamp.nn.layer_gains`); "" if it does not.

    Raises:
        ValueError: if a cast is not supported (`check_gemm`), `wire` is not the format of an operand or has block scales, or channels have
            scales although the input's scale is not delayed.
    """

    shape: tuple[int, int, int] | None = None
    in_bf16 = ""

    def __init__(self, gemm: Gemms, device: torch.device | str | None = None, wire: Format | None = None, *, channels: int = 0) -> None:
        check_gemm(gemm)
        check_device(gemm, torch.device(device or "cpu"))
        operands = (gemm.input, gemm.grad_output)
        super().__init__(operands if wire is None else (*operands, wire_cast(wire, operands)), device)
        self.gemm, self.raised, self.fusible = gemm, False, gemm.fusible
        self.channels: ChannelScales | None = None
        if channels:
            self.add_channels(channels)
        self._weight_refs: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None  # payload and scale_inv
        self._weight_seen = 0  # version of the payload for which `_weight_scales` was computed
        self._weight_scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def described(self) -> str:
        return f"input {self.gemm.input}, grad_output {self.gemm.grad_output}"

    def weight_was_written(self) -> None:
        """Restart the windows, because something other than the optimizer wrote the layer's weight, whose amaxes others do not predict.
        Averaged models (torch's AveragedModel with `use_buffers`) also mix `scale` and `history` of several steps."""
        self.reset()
        if self.channels is not None:
            self.channels.reset()

    def note(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Note the shape of the first forward in training, of `x` [.., K] and the weight [N, K]."""
        if self.shape is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.shape = (x.numel() // max(1, x.shape[-1]), weight.shape[1], weight.shape[0])

    def add_channels(self, features: int) -> None:
        """Give each of the input's `features` channels its own scale, if they have none. ValueError if the casts do not support them."""
        check_smooth(self.gemm)
        if self.channels is None:
            self.channels = ChannelScales(features, self.amax.device)

    def channel_slots(self, record: bool) -> ChannelSlots | None:
        """Return the slots of the input's channels; None without channel scales. With `record=False` amaxes are not recorded."""
        return None if self.channels is None else self.channels.slots(record=record, known=self._filled[INPUT])

    def check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        of_channels = {name.removeprefix("channels."): x for name, x in state.items() if name.startswith("channels.")}
        super().check_state({name: x for name, x in state.items() if not name.startswith("channels.")})
        if self.channels is not None and of_channels:
            try:
                self.channels.check_state(of_channels)
            except ValueError as problem:
                raise ValueError(f"channels.{problem}") from None

    def weight_scales(self, weight: ScalingTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the multiplier from `weight.payload` to FP8 and the scale_inv of the FP8 weight, both FP32 0-dim.

        For an FP8 payload, and for a weight that is not cast, or not with one scale, both are the stored scale_inv.

        The scale comes from the weight's own amax. It is measured again when the payload's version counter shows that the weight changed,
        once per step and without a sync. `ScalingState.measure_weights` does it for all layers together. A graph (torch.compile or a CUDA
        graph) would treat the version as a constant, so there every forward reads the weight to measure its amax.
        """
        cast = self.gemm.weight
        if weight.payload.dtype == cast.format.dtype or cast.granularity != TENSORWISE or self.in_bf16:
            return weight.scale_inv, weight.scale_inv
        payload = weight.payload
        in_graph = torch.compiler.is_compiling() or (payload.is_cuda and torch.cuda.is_current_stream_capturing())
        if in_graph or payload.is_inference():  # inference tensors have no version counter
            return self._fresh_weight_scales(weight)
        known = self._weight_seen == payload._version and self._weight_refs is not None and self._weight_refs[0]() is payload
        if self._weight_scales is None or not known:
            with torch.inference_mode(False), torch.no_grad():  # evaluation must not leave inference tensors, which training cannot save
                self._weight_scales = self._fresh_weight_scales(weight)
            self._weight_refs, self._weight_seen = (weakref.ref(payload), weakref.ref(weight.scale_inv)), payload._version
        return self._weight_scales

    def stale_weight(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return payload and scale_inv of the last forward's weight if it was written since; None if it was not, or there is no forward."""
        if self._weight_refs is None:
            return None
        payload, scale_inv = (ref() for ref in self._weight_refs)
        if payload is None or scale_inv is None or payload.is_inference() or self._weight_seen == payload._version:
            return None
        return payload, scale_inv

    def _fresh_weight_scales(self, weight: ScalingTensor) -> tuple[torch.Tensor, torch.Tensor]:
        cast = self.gemm.weight
        if own_rule(cast):
            return scales_of_weights(cast, ops.amax(weight.payload), weight.scale_inv)
        return ops.weight_scales(weight.payload, weight.scale_inv, cast.format.max)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_weight_refs": None, "_weight_scales": None}  # a copy measures its own weight

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.fusible = self.gemm.fusible  # missing in what was pickled before there were fused layers

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._weight_refs = self._weight_scales = None
        super()._apply(fn, recurse)
        check_device(self.gemm, self.amax.device)
        return self

    def extra_repr(self) -> str:
        wire = f", partial sums {self.casts[WIRE].format}" if len(self.casts) > WIRE else ""
        return f"{self.described}{wire}{', raised to BF16' if self.raised else ''}{', in BF16' if self.in_bf16 else ''}"


class ScalingState:
    """All `TensorScales` of a model, rolled together once per step.

    Layers that a fused layer's GEMM joins have one input and one gradient, whose amaxes the first layer's slots record. Modules list such
    groups by `scalings_alike`, for each half, which computes in FP8 or in BF16. A roll gives all members of a group the largest amax, so
    that their scales are valid for each layer on its own too.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {unwrapped(name): module for name, module in model.named_modules()}
        self._every = {name: module for name, module in modules.items() if isinstance(module, TensorScales) and module.window}
        self.linears = {name.removesuffix(".scaling"): module for name, module in modules.items() if isinstance(module, LinearScaling)}
        casts = {layer.described for layer in self._every.values() if isinstance(layer, LinearScaling)}
        if len(casts) > 1:
            raise ValueError(f"layers are cast in different ways ({'; '.join(sorted(casts))}); convert a model with one recipe")
        fused: list[Any] = [module for module in modules.values() if hasattr(type(module), "scalings_alike")]
        self.halves: list[tuple[str, list[tuple[LinearScaling, ...]]]] = [half for module in fused for half in module.scalings_alike()]
        self._may_skip = False  # whether a roll was given `usable`, so that only the device knows which steps count
        self._arrange()

    def compute_in_bf16(self, names: Mapping[str, str]) -> None:
        """Let the linear layers of these names, and no other, compute in BF16, for the given reasons. Their scales are not rolled, and are
        forgotten: a run that loads them into a layer in FP8 must not cast by them."""
        for name, layer in self.linears.items():
            if layer.in_bf16 != names.get(name, ""):
                layer.in_bf16, layer._weight_refs, layer._weight_scales = names.get(name, ""), None, None
                layer.weight_was_written()
        self._arrange()

    def _arrange(self) -> None:
        self.layers = {name: layer for name, layer in self._every.items() if not getattr(layer, "in_bf16", "")}
        members, row = [], 0
        first_rows: dict[TensorScales, int] = {}
        for layer in self.layers.values():
            first_rows[layer] = row
            if isinstance(layer, LinearScaling) and layer.channels is not None:
                members.append(ChannelsOfRow(layer.channels, row + INPUT, layer.casts[INPUT].format.max))
            row += len(layer.casts)
        self._channels = AllChannels(members)
        self._groups = RowGroups(row)
        for first, *others in (group for _, groups in self.halves for group in groups):
            self._groups.join(*(range(first_rows[each], first_rows[each] + WIRE) for each in (first, *others) if each in first_rows))
        self._alike: dict[tuple[Scaling, float], torch.Tensor] | None = None

    def _each(self, name: str) -> list[torch.Tensor]:
        """Return a buffer of every layer. Not by attribute: torch's lookup, a thousand times per step, took half of `roll`."""
        return [layer._buffers[name] for layer in self.layers.values()]  # type: ignore[misc]

    def _all(self, name: str) -> torch.Tensor:
        """Concatenate the rows of all layers."""
        return torch.cat(self._each(name))

    def _store(self, name: str, values: torch.Tensor) -> None:
        torch._foreach_copy_(self._each(name), values.split([len(layer.casts) for layer in self.layers.values()]))

    def _rows_alike(self, device: torch.device) -> dict[tuple[Scaling, float], torch.Tensor]:
        """Map (rule, largest value of the format) to the rows that use them, int64. Cached, since creating the tensors is a host sync."""
        if self._alike is None or any(rows.device != device for rows in self._alike.values()):
            alike: dict[tuple[Scaling, float], list[int]] = {}
            for row, cast in enumerate(cast for layer in self.layers.values() for cast in layer.casts):
                if cast.scaling.window:
                    alike.setdefault((cast.scaling, cast.format.max), []).append(row)
            self._alike = {rule: torch.tensor(rows, device=device) for rule, rows in alike.items()}
        return self._alike

    @torch.no_grad()
    def roll(
        self, group: dist.ProcessGroup | None = None, usable: torch.Tensor | None = None, *, copies: dist.ProcessGroup | None = None
    ) -> None:
        """End a step: record its amaxes in the histories and compute the next scales.

        Args:
            group: ranks that combine their amaxes (MAX, one small all-reduce for the whole model), so that every rank has the same
                histories and any rank's checkpoint works for all.
            usable: bool 0-dim, whether the step counts (`LowPrecisionOptimizer.usable`), the same on all ranks of `group`. If not,
                histories, scales and `seen` do not change. None: it counts.
            copies: those of `group` with the same channels of a layer, if not all have them: under tensor parallelism the data-parallel
                ranks. None: all.
        """
        self.roll_on_device(group, usable, copies=copies)
        self.count()

    def count(self) -> None:
        """Count one more step on the host. Call it after a replay of a CUDA graph that contains `roll_on_device`.

        The host counts every step; the device does not count skipped ones. When the host's count would fill a window, the host reads the
        device's count, unless no roll was given `usable`. This is one sync for the whole model, plus at most one per skipped step before.
        """
        counting = [layer for layer in self.layers.values() if layer.steps < layer.window]
        if counting and counting[0].seen.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing has run yet
        filling = (layer for layer in counting if any(cast.scaling.window == layer.steps + 1 for cast in layer.casts))
        asked = list(filling) if self._may_skip else []
        steps = {layer: layer.steps + 1 for layer in counting}
        if asked:
            steps |= zip(asked, torch.stack([layer.seen for layer in asked]).tolist(), strict=True)
        for layer, count in steps.items():
            layer._count(count)

    @torch.no_grad()
    def measure_weights(self) -> None:
        """Compute the FP8 scales of all layers' weights with a few launches. Call it after an update, on the compute stream.

        Otherwise each layer would compute its own in its next forward. It does nothing while a CUDA graph is captured, since the forwards
        in a graph measure their weights themselves.
        """
        alike: dict[tuple[Cast, torch.device, torch.dtype], list[tuple[LinearScaling, torch.Tensor, torch.Tensor]]] = {}
        for layer in self.linears.values():
            weight = layer.stale_weight()
            if weight is not None and not own_rule(layer.gemm.weight):
                alike.setdefault((layer.gemm.weight, weight[0].device, weight[0].dtype), []).append((layer, *weight))
        for (cast, device, _), members in alike.items():
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return
            layers, payloads, stored = zip(*members, strict=True)
            multipliers, scale_invs = scales_of_weights(cast, TENSORWISE.amaxes(payloads), torch.stack(stored))
            for layer, payload, *scales in zip(layers, payloads, multipliers.unbind(), aligned(scale_invs), strict=True):
                layer._weight_seen, layer._weight_scales = payload._version, tuple(scales)

    @torch.no_grad()
    def roll_on_device(
        self, group: dist.ProcessGroup | None = None, usable: torch.Tensor | None = None, *, copies: dist.ProcessGroup | None = None
    ) -> None:
        """Run the device's part of `roll`. It never waits for the device, so it can be captured in a CUDA graph."""
        if not self.layers:
            return
        self._may_skip |= usable is not None
        amax, last = self._groups.largest(self._all("amax")), {name: self._all(name) for name in ("history", "scale", "scale_inv")}
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group)
        # A step with an infinite value may count, since a cast saturates it; in the history it would freeze the scale for a whole window.
        amax = torch.where(amax < float("inf"), amax, 0.0)
        recorded = torch.ones((), dtype=torch.bool, device=amax.device) if usable is None else usable.to(amax.device)
        history = torch.cat([last["history"][:, 1:], amax.unsqueeze(-1)], dim=-1)
        scale = last["scale"].clone()
        for (rule, fp_max), rows in self._rows_alike(amax.device).items():
            scale[rows] = rule.next_scale(history[rows, -rule.window :], fp_max, scale[rows])
        for name, values in (("history", history), ("scale", scale), ("scale_inv", inverse(scale))):
            self._store(name, torch.where(recorded, values, last[name]))
        self._channels.roll(scale, group if copies is None else copies, recorded)
        torch._foreach_zero_(self._each("amax"))
        seen = self._each("seen")
        torch._foreach_copy_(seen, list((torch.stack(seen) + recorded).unbind()))

    @torch.no_grad()
    def abandon(self, finite: torch.Tensor) -> None:
        """Limit or drop the recorded amaxes after a backward whose gradients were dropped without a step.

        A loop may drop gradients in every step on purpose, with one backward for each of several losses of one forward. If their amaxes
        were always dropped, the scales of such a loop would never follow its values. So the amaxes of finite gradients are kept, but
        limited to twice the largest one in the history: they cost at most one bit of the format. A row without a history is not limited.
        The amaxes of a forward that already ran for the next step share the slots and are treated the same.

        Args:
            finite: bool 0-dim, whether the gradients were finite. If not, all amaxes since the last step are dropped.
        """
        if self.layers:
            amax, known = self._all("amax"), self._all("history").amax(-1)
            kept = torch.where(known > 0, torch.minimum(amax, 2 * known), amax)
            self._store("amax", torch.where(finite & (kept < float("inf")), kept, 0.0))
            self._channels.abandon(finite)
