"""Cast plain gradients to the optimizer's gradient format, many tensors per launch.

A gradient in a scaled format gets a just-in-time scale per tensor. One tensor at a time, that takes about twenty small launches per tensor:
an amax, the scale from its exponent bits, the cast. The host issues them more slowly than the device runs them: on an H200 they took a
third of an eager step with linear layers of 512 x 512. Here one launch measures all amaxes, one computes all scales, and one casts all
tensors into one flat buffer; each payload is a view of it. The result equals `ScalingTensor.quantize` bit for bit.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from msamp.kernels import ops
from msamp.kernels.tables import Tables
from msamp.numerics.formats import Format, by_name
from msamp.numerics.fp8_gradient import FP8Gradient, while_alive
from msamp.numerics.scaling import inverse
from msamp.numerics.tensor import ScalingTensor, contiguous

_LOG = logging.getLogger("msamp")
ALIGNMENT = 16  # elements; aligned payloads are read and written 16 bytes at a time


class GradCast:
    """Casts the gradients of one optimizer. It caches the tables of its launches; a copy or pickle starts without them."""

    def __init__(self) -> None:
        self._tables: dict[Format, Tables] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_tables": {}}

    def __call__(self, gradients: Sequence[torch.Tensor], fmt: Format, amaxes: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Cast gradients to one format.

        Args:
            gradients: plain, dense, of any shapes, on one device: FP32, BF16 or FP16.
            fmt: of the result. A format without a scale rounds the values once.
            amaxes: FP32 [gradients], of the whole tensors if these are only rows, +inf for a non-finite one; None measures them here.

        Returns:
            Contiguous tensors. For a scaled format ScalingTensors in the gradients' dtypes, with a NaN scale_inv if the amax is not finite;
            otherwise plain tensors, the gradient itself if it has the format's dtype.
        """
        gs = [contiguous(g) for g in gradients]
        if not gs:
            return []
        tables = self._tables.get(fmt)
        if tables is None or tables.device != gs[0].device:
            tables = self._tables[fmt] = Tables(gs[0].device)
        if not fmt.scaled:
            others = [i for i, g in enumerate(gs) if g.dtype != fmt.dtype]
            for i, packed in zip(others, _packed(tables, [gs[i] for i in others], fmt, None), strict=True):
                gs[i] = packed
            return gs
        if amaxes is None:
            amaxes = ops.grad_stats(tables, gs, squares=False)[0][0]
        scales = ops.scale_from_amax(amaxes, fmt.max, None, 1.0)
        scale_invs = inverse(scales).add_(amaxes, alpha=0.0).unbind()  # 0 times Inf or NaN is NaN: one launch instead of seven
        payloads = _packed(tables, gs, fmt, scales)
        return [ScalingTensor.of(packed, scale_inv, g.dtype) for packed, scale_inv, g in zip(payloads, scale_invs, gs, strict=True)]


def _packed(tables: Tables, gs: Sequence[torch.Tensor], fmt: Format, scales: torch.Tensor | None) -> list[torch.Tensor]:
    """Cast into one flat buffer and return views of it in the shapes of the tensors."""
    if not gs:
        return []
    sizes = [g.numel() for g in gs]
    rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    flat = torch.empty(sum(rooms), dtype=fmt.dtype, device=gs[0].device)
    pieces, start = [], 0
    for i, (size, room) in enumerate(zip(sizes, rooms, strict=True)):
        pieces.append((i, 0, size, start))
        start += room
    ops.pack(tables, gs, pieces, flat, scales)
    parts = zip(flat.split(rooms), gs, sizes, rooms, strict=True)
    return [(part if size == room else part[:size]).view(g.shape) for part, g, size, room in parts]


GROUP_ELEMENTS = 2**28  # 512 MiB of BF16
GROUPS = 8  # groups per backward of a large model
WATCHED = 8  # backwards after which a loop that the host bounds is told of `msamp.capture`

Place = tuple[int, int]  # the index of a device, -1 for the CPU, and the stream on which its gradients arrived
_CPU: Place = (-1, 0)


class BackwardCasts:
    """Hooks that cast the gradients of one optimizer's parameters to FP8 while backward runs, so that BF16 gradients of the whole model
    never exist at the same time.

    A hook on each parameter whose recipe has FP8 gradients notes that backward has left a gradient in `p.grad`. Once a group of gradients
    is complete, and at the end of backward, `GradCast` casts the group in a few launches, `p.grad` becomes an `FP8Gradient`, and the memory
    of the wide gradients is free for the rest of backward. The optimizer would have cast them in the same way in its step: the bits are the
    same.

    A group has an eighth of all elements, or `GROUP_ELEMENTS` if that is more: casting a group costs the host the same time whatever its
    size. The wide gradients of one group exist at a time: a quarter byte per parameter, or 512 MiB.

    A second backward before `zero_grad` widens an FP8Gradient, and it stays wide: cast again, it would be a sum in FP8. What backward adds
    to zeros (`zero_grad(set_to_none=False)`) is cast as usual.
    """

    def __init__(self) -> None:
        self._formats: dict[int, Format] = {}  # by the id of a parameter, which the optimizer holds
        self._total = 0  # elements of the hooked parameters
        self._group = GROUP_ELEMENTS  # elements of a group
        self._handles: dict[int, RemovableHandle] = {}
        self._pending: dict[Place, dict[int, torch.Tensor]] = {}
        self._elements: dict[Place, int] = {}
        self._casts: dict[tuple[Place, int, str], GradCast] = {}  # by their place in backward: the same gradients in every step
        self._flushes: dict[Place, int] = {}
        self._backward = -1
        self._watched = self._idle = 0  # backwards, and after how many of them the GPU had nothing left to do
        self._paused = 0

    def attach(self, params: Iterable[tuple[torch.Tensor, Mapping[str, str]]]) -> None:
        """Hook the parameters that are not hooked yet, require a gradient, and have an FP8 gradient format."""
        for p, formats in params:
            if id(p) in self._formats or not p.requires_grad:
                continue
            fmt = by_name(formats["grad"])
            if fmt.scaled and fmt.bytes == 1:
                self._formats[id(p)] = fmt
                self._total += p.numel()
                self._handles[id(p)] = p.register_post_accumulate_grad_hook(while_alive(self.arrived))
        self._group = max(GROUP_ELEMENTS, self._total // GROUPS)

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self.__init__()  # type: ignore[misc]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which gradients are not cast, because more will be accumulated."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def arrived(self, p: torch.Tensor) -> None:
        """Record that backward has accumulated a gradient in `p.grad`, and cast its group once that is complete. The host runs this for
        each parameter while the GPU may wait for it, so everything that can be asked once per group is left to `_cast`."""
        if self._paused:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._flushes = backward, {}  # gradients that a failed backward left in `_pending` are cast with the rest
            torch.autograd.Variable._execution_engine.queue_callback(while_alive(self.ended))
        device = p.get_device()
        place = _CPU if device < 0 else (device, torch._C._cuda_getCurrentRawStream(device))
        if place not in self._pending:
            self._pending[place], self._elements[place] = {}, 0
        self._pending[place][id(p)] = p
        self._elements[place] += p.numel()
        if self._elements[place] >= self._group:
            self._cast(place)

    def ended(self) -> None:
        """Cast the rest, at the end of backward."""
        gpus = [device for device, _ in self._pending if device >= 0]
        if self._watched < WATCHED and gpus and not torch.cuda.is_current_stream_capturing():
            self._watched += 1
            self._idle += torch.cuda.current_stream(gpus[0]).query()
            if self._watched == WATCHED and self._idle > WATCHED // 2:
                _LOG.info("the GPU waits for the host in backward: launches bound the step; msamp.capture runs it as one CUDA graph")
        for place in list(self._pending):
            self._cast(place)

    @torch._disable_dynamo  # of a compiled training step: a hook runs as it is
    @torch.no_grad()
    def _cast(self, place: Place) -> None:
        device, stream = place
        number = self._flushes[place] = self._flushes.get(place, 0) + 1
        pending = self._pending.pop(place)
        by_format: dict[str, tuple[Format, list[torch.Tensor], list[torch.Tensor]]] = {}
        for key, p in pending.items():
            g, fmt = p.grad, self._formats.get(key)
            plain = _plain(g)
            if plain is not None and fmt is not None:
                _, params, gradients = by_format.setdefault(fmt.name, (fmt, [], []))
                params.append(p)
                gradients.append(plain)
        for name, (fmt, params, gradients) in by_format.items():
            cast = self._casts.setdefault((place, number, name), GradCast())
            if device >= 0 and stream != torch._C._cuda_getCurrentRawStream(device):
                for g in gradients:
                    g.record_stream(torch.cuda.current_stream(device))
            for p, narrow in zip(params, cast(gradients, fmt), strict=True):
                assert isinstance(narrow, ScalingTensor)
                if type(p.grad) is FP8Gradient:
                    p.grad.narrow_to(narrow)
                else:
                    p.grad = FP8Gradient(narrow)


def _plain(g: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient as a plain tensor if exactly one backward wrote it, None if a hook replaced it or it is a sum of several."""
    if type(g) is FP8Gradient:
        return g.held if g.was_zeroed and not isinstance(g.held, ScalingTensor) else None
    return g if type(g) is torch.Tensor and not g.requires_grad and g.layout is torch.strided else None
