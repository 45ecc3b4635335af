"""Small models whose parameters say in their names in which format their gradients travel, and their synchroniser."""

from typing import Any

import torch
from torch import Tensor, nn

from helpers.numerics import bits
from msamp.comm.grad_sync import GradSync
from msamp.kernels.tables import Tables
from msamp.numerics.formats import Format, by_name
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import first_pass
from msamp.parallel.data_parallel import grad_sync


def model_of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> nn.ParameterDict:
    model = nn.ParameterDict()  # which sorts what it is given at once
    for name, shape in shapes.items():
        model[name] = nn.Parameter(torch.zeros(shape, dtype=dtype))
    return model


def formats_of(model: nn.Module) -> dict[Tensor, Format]:
    """By the part of the name before "_"."""
    return {p: by_name(name.split("_")[0]) for name, p in model.named_parameters()}


def synced(model: nn.Module, group=None, **options: Any) -> GradSync:
    return grad_sync(model, formats_of(model), group, **options)


def synchronized_right(g: Tensor) -> bool:
    """Whether a gradient's tally, if it has one, equals a read of its payload in every bit."""
    if not isinstance(g, ScalingTensor) or g.tally is None:
        return True
    unread = ScalingTensor(g.payload, g.scale_inv, g.dtype)
    pairs = zip(first_pass(Tables(g.device), [g], []), first_pass(Tables(g.device), [unread], []), strict=True)
    return all(mine.equal(read) for mine, read in pairs)


def stamp(g: Tensor | None) -> tuple | None:
    """Everything about a gradient, comparable and small to send; None of none."""
    if g is None:
        return None
    payload = g.payload if isinstance(g, ScalingTensor) else g
    scale = bits(g.scale_inv).numpy().tobytes() if isinstance(g, ScalingTensor) else b""
    return g.dtype, payload.dtype, tuple(g.shape), bits(payload).numpy().tobytes(), scale


def merged(ranks: list[dict[str, dict[int, tuple]]], name: str) -> tuple | None:
    """The stamp of the whole tensor from those of equal copies or of pieces, by first row; None where no rank has it."""
    pieces: dict[int, tuple] = {}
    for rank in ranks:
        for row, found in rank[name].items():
            assert pieces.setdefault(row, found) == found, f"{name} differs between ranks"
    if not pieces:
        return None
    ordered = [pieces[row] for row in sorted(pieces)]
    assert len({(x[0], x[1], x[4]) for x in ordered}) == 1, f"the pieces of {name} do not share a scale"
    shape = ordered[0][2] and (sum(x[2][0] for x in ordered), *ordered[0][2][1:])
    return *ordered[0][:2], shape, b"".join(x[3] for x in ordered), ordered[0][4]
