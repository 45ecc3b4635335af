"""Small models whose parameters say in their names in which format their gradients travel, and their synchroniser."""

from typing import Any

import torch
from torch import Tensor, nn

from msamp.comm.grad_sync import GradSync
from msamp.numerics.formats import Format, by_name
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
