"""Tensors as a checkpoint stores them, in chunks, and the places that ask for them."""

from pathlib import Path

import torch
from torch import Tensor

from megatron.lm.checkpoint.content import scale_key
from megatron.lm.checkpoint.files import storage
from megatron.lm.checkpoint.files.storage import Item, Stored
from megatron.lm.checkpoint.place import Place
from megatron.lm.checkpoint.values import StoredTensor
from msamp.numerics.formats import Format
from msamp.numerics.quantize import quantize
from msamp.numerics.tensor import ScalingTensor


def place(offset: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], start: int = 0, name: str = "w") -> Place:
    return Place(name=name, shape=shape, offset=offset, start=start, sizes=sizes, first=True)


def quantized(values: Tensor, fmt: Format, scale: float) -> ScalingTensor:
    return ScalingTensor(quantize(values, torch.tensor(scale), fmt), torch.tensor(1 / scale), torch.float32)


def chunk(x: ScalingTensor | Tensor, offset: tuple[int, ...], shape: tuple[int, ...], key: str = "model/w") -> list[Item]:
    if not isinstance(x, ScalingTensor):
        return [Item(key, x, shape, offset)]
    return [Item(key, x.payload, shape, offset), Item.whole(scale_key(key, offset), x.scale_inv)]


def stored(folder: Path, *chunks: list[Item]) -> Stored:
    folder.mkdir(exist_ok=True)
    storage.write(folder, [item for items in chunks for item in items])
    return Stored(folder)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def one(x: ScalingTensor | Tensor) -> StoredTensor:
    """The whole of a tensor as found in one chunk."""
    if isinstance(x, ScalingTensor):
        return StoredTensor("model/w", x.payload, [((slice(None),) * x.dim(), x.scale_inv)])
    return StoredTensor("model/w", x, [])
