"""Smooth-SwiGLU: one power-of-two scale per channel for the input of the linear layer behind a SwiGLU (Fishman et al., 2024, section 4.4).

Why. SwiGLU multiplies two linear functions of a token. Late in training the two weights of some channels align, and such a channel then
grows with the square of the token's projection: a few channels are hundreds or thousands of times larger than the others, and only for some
tokens. One scale per tensor must make room for them. The other channels fall to the bottom of FP8's range or below it; and with a delayed
scale, a channel that grows from one step to the next saturates.

What. Let a [tokens, F] be the activation, W2 [hidden, F] the next weight, s [F] powers of two. The layer computes

    out = Q(a s S) Q(W2 / s)^T / S        S: the tensor's scale

instead of Q(a S) Q(W2)^T / S. The sum over the F channels contains each s once as a factor and once as a divisor, so the product is the
same. (A factor per channel that is summed over cannot be taken out of a GEMM afterwards, which is why W2 must be divided before it.)

How s is chosen. A just-in-time maximum per channel would read the activation twice. Here the kernel that computes the activation records
the maxima of its channels as a by-product. At the end of a step each channel's `peak` becomes

    peak = max(this step's amax, DECAY peak)

and s raises small channels: it is the largest power of two, from 1 to MOST, with  peak S s <= max / HEADROOM. The largest channels have
s = 1, so that the tensor's scale S, its history and its rule are the same as without channel scales. Two choices come from E4M3, whose
codes keep their relative precision over 15 powers of two:

- HEADROOM. A channel is raised only if its peak is more than 64 times smaller than the largest code, and then may grow 64-fold in one step
  before it saturates. That costs nothing: a channel with its peak at 7 has 11 powers of two below it before codes become zero. In an
  ordinary layer nearly all s are 1.
- MOST bounds what is asked of the weight. A weight with normally distributed elements has its standard deviation at 2^6.5 of 2^8.8, and the
  smallest normal code is 2^-6. Divided by at most 2^10, the elements that lose bits to subnormals are those below 2^-2.5 of the standard
  deviation, and the loss is 12 dB below the rounding error of E4M3.

The weight. The stored W2 does not change: neither the optimizer nor a checkpoint nor an export knows s, and nothing has to be folded when
a model is exported. Each forward divides the columns in the cast to FP8, which O1 and O2 run anyway; for an FP8 weight (O3) it is one more
pass over the weight. Dividing a code by a power of two is exact but for results that are subnormal (above).

Backward. grad_input = g W2 is the gradient of a, without s: it reads the stored weight as always. grad_weight = g^T (a s) has every
column multiplied by s, and is divided by it, exactly, in the gradient's dtype. The codes of a s are the same as in forward.

With tensor parallelism the channels are split like the weight's columns, and each rank has the scales of its channels. Ranks with the same
channels combine their maxima.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from msamp.nn.cast_checks import check_powers, check_range
from msamp.nn.cast_scales import CastScales
from msamp.numerics.formats import FP32
from msamp.numerics.scaling import scale_from_amax

DECAY = 15 / 16  # of a peak per step: after 16 steps without a large value it is 0.36 of what it was
HEADROOM = 64.0
MOST = 1024.0


class ChannelSlots(NamedTuple):
    """The channel scales of one cast in this step.

    Attributes:
        scale: FP32 [F], powers of two; None while the tensor's scale is just-in-time, which would be measured before them.
        amax: FP32 [F], receives the amaxes of the channels; None does not record them.
    """

    scale: torch.Tensor | None
    amax: torch.Tensor | None

    def smooth(self, x: torch.Tensor, slot: CastScales) -> tuple[torch.Tensor, CastScales]:
        """Record the amaxes of `x` and multiply its channels, for a cast outside of the fused block.

        Args:
            x: [M, F] BF16, FP16 or FP32.
            slot: of the tensor; the amax of `x` is recorded in it.

        Returns:
            FP32 [M, F] (`x` itself without scales), and the slot for its cast.
        """
        if self.amax is not None and x.shape[0]:
            amax = x.abs().amax(0).float().nan_to_num(nan=float("inf"), posinf=float("inf"))
            self.amax.copy_(torch.maximum(self.amax, amax))
        if self.scale is None:
            return x, slot
        slot.record(x)
        return x * self.scale, slot._replace(amax=None)


class KeepsDtypes(nn.Module):
    """A module whose buffers move with the model, but keep their dtype under `model.bfloat16()`. `model.to_empty` resets those on meta."""

    def reset(self) -> None:
        """Give the buffers the values of a new module."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        def keep_dtype(x: torch.Tensor) -> torch.Tensor:
            moved = fn(x)
            return moved if moved.dtype == x.dtype else x.to(moved.device)

        on_meta = any(x.is_meta for x in self.buffers(recurse=False))
        super()._apply(keep_dtype, recurse)
        if on_meta and not any(x.is_meta for x in self.buffers(recurse=False)):
            self.reset()  # only `to_empty` leaves the meta device, with whatever was in the memory
        return self


class ChannelScales(KeepsDtypes):
    """The scales of the channels of one layer's input, a part of its `LinearScaling`.

    Buffers (FP32 [features], saved with the model): `amax` of the current step, `peak` and `scale` as the module's docstring defines them.
    """

    amax: torch.Tensor
    peak: torch.Tensor
    scale: torch.Tensor

    def __init__(self, features: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.features = features
        self.register_buffer("amax", torch.zeros(features, device=device, dtype=torch.float32))
        self.register_buffer("peak", torch.zeros(features, device=device, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(features, device=device, dtype=torch.float32))

    def slots(self, *, record: bool, known: bool) -> ChannelSlots:
        """Return the slots of this step.

        Args:
            record: whether amaxes are recorded.
            known: whether the tensor's scale is known before the cast.
        """
        return ChannelSlots(self.scale if known else None, self.amax if record else None)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the peaks, because something other than the optimizer wrote the weights before this input."""
        self.amax.zero_()
        self.peak.zero_()
        self.scale.fill_(1.0)

    def check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise a ValueError naming the first saved buffer that no run can have written: a wrong dtype, or a value out of range."""
        for name, x in state.items():
            check_range(name, x, torch.float32, *((1.0, MOST) if name == "scale" else (0.0, FP32.max)))
        check_powers(state["scale"])

    def extra_repr(self) -> str:
        return f"{self.features} channels"


def next_scales(peak: torch.Tensor, tensor_scale: torch.Tensor, fp_max: float) -> torch.Tensor:
    """Return the scales of channels, FP32 in the shape of `peak`, powers of two from 1 to `MOST`.

    Args:
        peak: FP32 [.., F], not negative; a channel without any value has scale 1.
        tensor_scale: FP32, broadcastable against it.
        fp_max: largest value of the format.
    """
    return scale_from_amax(peak * tensor_scale, fp_max / HEADROOM).clamp(1.0, MOST)


class ChannelsOfRow(NamedTuple):
    """Channel scales, the row of their tensor among all rows of a `ScalingState`, and the largest value of its format."""

    channels: ChannelScales
    row: int
    fp_max: float


class AllChannels:
    """The channel scales of a model, rolled together once per step."""

    def __init__(self, members: Sequence[ChannelsOfRow]) -> None:
        self._layers = [member.channels for member in members]
        alike: dict[tuple[int, float], list[ChannelsOfRow]] = {}
        for member in members:
            alike.setdefault((member.channels.features, member.fp_max), []).append(member)
        self._alike = alike
        self._rows: dict[tuple[int, float], torch.Tensor] = {}  # of layers alike, int64; kept, since creating the tensor is a host sync

    @torch.no_grad()
    def roll(self, tensor_scales: torch.Tensor, group: dist.ProcessGroup | None, recorded: torch.Tensor) -> None:
        """End a step. It never waits for the device, so it can be captured in a CUDA graph.

        Args:
            tensor_scales: FP32 [rows], the next scale of each row.
            group: ranks that have the same channels and combine their amaxes (MAX); None for one rank.
            recorded: bool 0-dim, whether the step counts; if not, peaks and scales do not change.
        """
        if not self._layers:
            return
        amaxes = _buffers(self._layers, "amax")
        if group is not None and dist.get_world_size(group) > 1:
            together = torch.cat(amaxes)
            dist.all_reduce(together, dist.ReduceOp.MAX, group)
            torch._foreach_copy_(amaxes, list(together.split([layer.features for layer in self._layers])))
        for key, members in self._alike.items():
            layers = [member.channels for member in members]
            amax, peak, scale = (torch.stack(_buffers(layers, name)) for name in ("amax", "peak", "scale"))
            if key not in self._rows or self._rows[key].device != amax.device:
                self._rows[key] = torch.tensor([member.row for member in members], device=amax.device)
            highest = torch.maximum(torch.where(amax < float("inf"), amax, 0.0), peak * DECAY)
            following = next_scales(highest, tensor_scales[self._rows[key]].unsqueeze(-1), key[1])
            for name, values, last in (("peak", highest, peak), ("scale", following, scale)):
                torch._foreach_copy_(_buffers(layers, name), list(torch.where(recorded, values, last).unbind()))
        torch._foreach_zero_(amaxes)

    @torch.no_grad()
    def abandon(self, finite: torch.Tensor) -> None:
        """After a backward whose gradients were dropped: limit the amaxes to twice the peaks, or drop them (`ScalingState.abandon`)."""
        for layer in self._layers:
            limited = torch.where(layer.peak > 0, torch.minimum(layer.amax, 2 * layer.peak), layer.amax)
            layer.amax.copy_(torch.where(finite & (limited < float("inf")), limited, 0.0))


def _buffers(layers: Sequence[ChannelScales], name: str) -> list[torch.Tensor]:
    return [layer._buffers[name] for layer in layers]  # type: ignore[misc]  # not by attribute, which takes the host several times as long
