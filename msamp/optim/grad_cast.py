"""Cast plain gradients to the optimizer's gradient format, many tensors per launch.

A gradient in a scaled format gets a just-in-time scale per tensor. One tensor at a time, that takes about twenty small launches per tensor:
an amax, the scale from its exponent bits, the cast. The host issues them more slowly than the device runs them: on an H200 they took a
third of an eager step with linear layers of 512 x 512. Here one launch measures all amaxes, one computes all scales, and one casts all
tensors into one flat buffer; each payload is a view of it. The result equals `ScalingTensor.quantize` bit for bit.
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
