"""The scales of a model's linear layers between steps: delayed scaling kept on the device, rolled once a step."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from msamp.kernels import ops
from msamp.numerics.formats import Format
from msamp.numerics.recipe import Gemm
from msamp.numerics.scaling import inverse
from msamp.numerics.tensor import ScalingTensor

INPUT, GRAD_OUTPUT, WIRE = 0, 1, 2  # rows of a layer's arrays


# Is told of a cast: the values before it, the payload, scale_inv.
Watch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Slot(NamedTuple):
    """What one cast needs: the scale known beforehand (None: just in time) and where this step's amax goes (None: nowhere); and who
    is told of it (None: nobody)."""

    scale: torch.Tensor | None
    scale_inv: torch.Tensor | None
    amax: torch.Tensor | None
    watch: Watch | None = None


class LinearScaling(nn.Module):
    """Scales of one linear layer: its input's and its grad_output's history, and the FP8 scale of its weight.

    Buffers (FP32, saved with the model): `amax` [rows] of the step so far, `history` [rows, window], `scale` and `scale_inv`
    [rows], row 0 the input, row 1 the grad_output; `seen` (int64) steps recorded. Until the window is filled, and with
    current scaling, casts are just-in-time.

    Args:
        gemm: how the operands are cast.
        device: of the buffers.
        wire: the format in which partial sums of this layer travel between tensor-parallel ranks, the input's or the
            grad_output's; they get row 2. None: there are two rows.

    Attributes:
        watches: who is told of the casts of a training step, by row; fused layers make the values before the cast for them alone.
    """

    amax: torch.Tensor
    history: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    seen: torch.Tensor

    def __init__(self, gemm: Gemm, device: torch.device | str | None = None, wire: Format | None = None) -> None:
        super().__init__()
        if gemm.input.scaling != gemm.grad_output.scaling:
            raise ValueError(
                f"input scaling {gemm.input.scaling} and grad_output scaling {gemm.grad_output.scaling} differ; give both the same rule"
            )
        operands = (gemm.input.format, gemm.grad_output.format)
        if wire is not None and wire not in operands:
            raise ValueError(f"partial sums in {wire} are unknown; choose {operands[0]} or {operands[1]}, the formats of the layer's casts")
        self.gemm = gemm
        self.formats = operands if wire is None else (*operands, wire)  # by row
        self.window = gemm.input.scaling.window
        rows = len(self.formats)
        self.register_buffer("amax", torch.zeros(rows, device=device))
        self.register_buffer("history", torch.zeros(rows, self.window, device=device))
        self.register_buffer("scale", torch.ones(rows, device=device))
        self.register_buffer("scale_inv", torch.ones(rows, device=device))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device=device))
        # `seen` on the host, since asking the device would be a sync in every forward; and whether the window is full, as a
        # flag of its own: torch.compile would make a new graph for every value of a counter.
        self.steps = 0
        self.delayed = False
        self.watches: dict[int, Watch] = {}
        self._weight_ref: weakref.ref[torch.Tensor] | None = None
        self._weight_seen = 0  # version of the payload that the weight's scales were taken from
        self._weight_scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def _count(self, steps: int) -> None:
        self.steps, self.delayed = steps, 0 < self.window <= steps

    def slots(self, record: bool) -> tuple[Slot, ...]:
        """The slots by row; `record` False (evaluation) leaves no trace in the history."""

        def slot(row: int) -> Slot:
            amax = self.amax[row] if record and self.window else None
            watch = self.watches.get(row) if record else None
            if not self.delayed:
                return Slot(None, None, amax, watch)
            return Slot(self.scale[row], self.scale_inv[row], amax, watch)

        return tuple(slot(row) for row in range(len(self.formats)))

    def weight_scales(self, weight: ScalingTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(multiplier from `weight.payload` into FP8, scale_inv of the FP8 weight), both FP32 0-dim; an FP8 payload is taken as it is.

        The weight's own amax decides, taken anew whenever the weight has changed: that is once a step, and the payload's
        version counter tells without a sync. A graph (torch.compile's, a CUDA graph) would take the version for a constant:
        there the amax is taken in every forward, 0.6 ms for 1.3B parameters.
        """
        if weight.payload.dtype == self.gemm.weight.format.dtype:
            return weight.scale_inv, weight.scale_inv
        payload = weight.payload
        in_graph = torch.compiler.is_compiling() or (payload.is_cuda and torch.cuda.is_current_stream_capturing())
        if in_graph or payload.is_inference():  # such a tensor counts no versions
            return self._fresh_weight_scales(weight)
        known = self._weight_ref is not None and self._weight_ref() is payload and self._weight_seen == payload._version
        if self._weight_scales is None or not known:
            with torch.inference_mode(False), torch.no_grad():  # evaluation must not leave scales that training cannot save
                self._weight_scales = self._fresh_weight_scales(weight)
            self._weight_ref, self._weight_seen = weakref.ref(payload), payload._version
        return self._weight_scales

    def _fresh_weight_scales(self, weight: ScalingTensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = ops.scale_from_amax(ops.amax(weight.payload) * weight.scale_inv, self.gemm.weight.format.max, None, 1.0)
        return scale * weight.scale_inv, inverse(scale)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight_ref": None, "_weight_scales": None, "watches": {}}  # a copy looks at its own weight

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._count(int(self.seen))

    def _apply(self, fn: Any, recurse: bool = True) -> "LinearScaling":
        # model.bfloat16() must move these arrays with the model and leave their precision alone.
        def keep_dtype(x: torch.Tensor) -> torch.Tensor:
            moved = fn(x)
            return moved if moved.dtype == x.dtype else x.to(moved.device)

        self._weight_ref = self._weight_scales = None
        return super()._apply(keep_dtype, recurse)

    def extra_repr(self) -> str:
        wire = f", partial sums {self.formats[WIRE]}" if len(self.formats) > WIRE else ""
        return f"input {self.gemm.input}, grad_output {self.gemm.grad_output}{wire}"


class ScalingState:
    """All the LinearScaling of a model, rolled together once a step.

    Args:
        model: the module tree to look through.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, LinearScaling] = {
            name: module for name, module in model.named_modules() if isinstance(module, LinearScaling) and module.window
        }
        casts = {f"input {layer.gemm.input}, grad_output {layer.gemm.grad_output}" for layer in self.layers.values()}
        if len(casts) > 1:
            raise ValueError(f"layers are cast in different ways ({'; '.join(sorted(casts))}); convert a model with one recipe")
        self._as_grad: torch.Tensor | None = None

    def _all(self, name: str) -> torch.Tensor:
        """The rows of every layer, one layer after the other."""
        return torch.cat([getattr(layer, name) for layer in self.layers.values()])

    def _store(self, name: str, values: torch.Tensor) -> None:
        stored = [getattr(layer, name) for layer in self.layers.values()]
        torch._foreach_copy_(stored, values.split([len(rows) for rows in stored]))

    def _in_grad_format(self, device: torch.device) -> torch.Tensor:
        """Bool, by row: cast into the grad_output's format and not into the input's. Kept, since to make it is a host sync."""
        if self._as_grad is None or self._as_grad.device != device:
            rows = [fmt == layer.gemm.grad_output.format for layer in self.layers.values() for fmt in layer.formats]
            self._as_grad = torch.tensor(rows, device=device)
        return self._as_grad

    @torch.no_grad()
    def roll(self, group: dist.ProcessGroup | None = None) -> None:
        """End of a step: this step's amaxes enter the histories and the next scales follow from them.

        Args:
            group: ranks whose amaxes are combined (MAX, one small all-reduce for the whole model), so that every rank
                keeps the same histories and any rank's checkpoint serves all.
        """
        self.roll_on_device(group)
        self.count()

    def count(self) -> None:
        """The host's part of `roll`: one step more. After a replay of a CUDA graph that holds the device's part."""
        for layer in self.layers.values():
            layer._count(layer.steps + 1)

    @torch.no_grad()
    def roll_on_device(self, group: dist.ProcessGroup | None = None) -> None:
        """The device's part of `roll`."""
        if not self.layers:
            return
        layers = list(self.layers.values())
        amax = self._all("amax")
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group)
        # The step of one that is not finite is skipped; kept, it would hold the scale for a whole window.
        amax = torch.where(amax < float("inf"), amax, 0.0)
        history = torch.cat([self._all("history")[:, 1:], amax.unsqueeze(-1)], dim=-1)
        window_amax, last, gemm = history.amax(-1), self._all("scale"), layers[0].gemm
        scale = torch.where(
            self._in_grad_format(amax.device),
            ops.scale_from_amax(window_amax, gemm.grad_output.format.max, last, 1.0),
            ops.scale_from_amax(window_amax, gemm.input.format.max, last, 1.0),
        )
        self._store("history", history)
        self._store("scale", scale)
        self._store("scale_inv", inverse(scale))
        torch._foreach_zero_([layer.amax for layer in layers])
        torch._foreach_add_([layer.seen for layer in layers], 1)
