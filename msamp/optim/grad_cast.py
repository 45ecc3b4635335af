"""Plain gradients into the formats of the optimizer, many tensors at a time.

A plain gradient in a format with a scale takes a just-in-time scale, one a tensor. Tensor by tensor that is some twenty small launches: an
amax, the scale from its exponent bits, the cast. The host needs longer to issue them than the device to run them: on an H200 they were a
third of an eager step with linear layers of 512 x 512. Here one launch reads all amaxes, one makes all scales, and one casts all
tensors into one flat buffer, of which each payload is a view. The bits are those of `ScalingTensor.quantize`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from msamp.kernels import ops
from msamp.kernels.tables import Tables
from msamp.numerics.formats import Format
from msamp.numerics.scaling import inverse
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import contiguous

ALIGNMENT = 16  # elements: a payload that begins at a multiple of them is read and written 16 bytes at a time


class GradCast:
    """Casts the gradients of one optimizer, with what its launches remember from step to step; a copy remembers nothing."""

    def __init__(self) -> None:
        self._tables: dict[Format, Tables] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_tables": {}}

    def __call__(self, gradients: Sequence[torch.Tensor], fmt: Format, amaxes: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Gradients in one format.

        Args:
            gradients: plain, dense, of any shapes, on one device: FP32, BF16 or FP16.
            fmt: of the result; without scales, the values rounded once.
            amaxes: FP32 [gradients], of the whole tensors of which these may be rows, +inf where one is not finite; None reads them here.

        Returns:
            ScalingTensors in the gradients' dtypes, for a format with scales; a scale_inv is NaN where the amax is not finite. Plain
            tensors otherwise: the gradient itself where it has the format's dtype. All contiguous.
        """
        gs = [contiguous(g) for g in gradients]
        if not gs:
            return []
        tables = self._tables.get(fmt)
        if tables is None or tables.device != gs[0].device:
            tables = self._tables[fmt] = Tables(gs[0].device)
        if not fmt.scaled:
            others = [i for i, g in enumerate(gs) if g.dtype != fmt.dtype]
            for i, made in zip(others, _packed(tables, [gs[i] for i in others], fmt, None), strict=True):
                gs[i] = made
            return gs
        if amaxes is None:
            amaxes = ops.grad_stats(tables, gs, squares=False)[0][0]
        scales = ops.scale_from_amax(amaxes, fmt.max, None, 1.0)
        scale_invs = inverse(scales).masked_fill(~amaxes.isfinite(), float("nan")).unbind()
        payloads = _packed(tables, gs, fmt, scales)
        return [ScalingTensor(made, scale_inv, g.dtype) for made, scale_inv, g in zip(payloads, scale_invs, gs, strict=True)]


def _packed(tables: Tables, gs: Sequence[torch.Tensor], fmt: Format, scales: torch.Tensor | None) -> list[torch.Tensor]:
    """Casts into one flat buffer: its parts, in the shapes of the tensors."""
    if not gs:
        return []
    sizes = [g.numel() for g in gs]
    rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    flat = torch.empty(sum(rooms), dtype=fmt.dtype, device=gs[0].device)
    spans, start = [], 0
    for i, (size, room) in enumerate(zip(sizes, rooms, strict=True)):
        spans.append((i, 0, size, start))
        start += room
    ops.pack(tables, gs, spans, flat, scales)
    parts = zip(flat.split(rooms), gs, sizes, rooms, strict=True)
    return [(part if size == room else part[:size]).view(g.shape) for part, g, size, room in parts]
