"""Convert stored tensors to the shards and formats of this run.

A pair (Collage) is the sum of its components: `find_whole` adds the remainder of a weight or second moment. An E4M3 remainder has no scale
and is only meaningful with its first component (`mcf.load_pair`).

A tensor keeps its bits if its format stays and all its chunks have one scale, which holds for whole tensor-parallel shards. Otherwise it is
requantized: chunks of one format with several scales use the coarsest (scales are powers of two, so only values below the smallest
subnormal of that scale are rounded); another format uses a scale from the tensor's amax. Moments in COAT's format keep their bits if every
group of the new shard is in one stored group, or in several equal ones: for any split along rows, and along columns at multiples of 128.
Otherwise groups are requantized, each value to the nearest of E4M3 or E5M2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.lm.checkpoint.content import group_keys, scale_key
from megatron.lm.checkpoint.files.index import Chunk
from megatron.lm.checkpoint.files.storage import Region, Stored
from megatron.lm.checkpoint.place import Place
from megatron.lm.checkpoint.tensor_rules import extents, tensor_problem
from msamp.numerics import mcf
from msamp.numerics.formats import ALL, BF16, EXPANDED, REMAINDER_E4M3, Format
from msamp.numerics.granularity import Group
from msamp.numerics.quantize import quantize
from msamp.numerics.range_expand import STATE_GROUP, Expanded, quantize_expanded
from msamp.numerics.scaling import inverse
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.updates import MASTER, WEIGHT, remainders

_DTYPES = {fmt.dtype for fmt in ALL}
_GROUPED = {fmt.dtype for fmt in EXPANDED}


def firsts() -> dict[str, str]:
    """Return the key of the first component of each pair, by the key of the second."""
    return {key: "model" if first == WEIGHT else first for key, first in remainders().items()}


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A local tensor as stored: `payload`, and the `scale_inv` of each part (slices) with its own scale; in COAT's format `groups`, FP32,
    the maximum and exponent of each element's group.
    """

    key: str
    payload: Tensor
    scales: list[tuple[tuple[slice, ...], Tensor]]
    groups: tuple[Tensor, Tensor] | None = None

    @property
    def scale_inv(self) -> Tensor | None:
        """Return the scale of the whole payload, FP32 0-dim; None if it is plain or has several."""
        first = self.scales[0][1] if self.scales else None
        return first if all(torch.equal(scale, self.scales[0][1]) for _, scale in self.scales) else None

    def values(self) -> Tensor:
        """Return the dequantized values, FP32."""
        if self.groups is not None:
            return Expanded(self.payload, *self.groups, Group(1)).dequantize()
        decoded = self.payload.float()
        for part, scale_inv in self.scales:
            decoded[part] *= scale_inv
        return decoded

    def keeps_bits(self, fmt: Format) -> bool:
        """Return whether `fmt` keeps all bits."""
        if self.groups is not None or fmt.group:
            agree = self.groups is not None and all(STATE_GROUP.spread(_firsts(x), x.shape).equal(x) for x in self.groups)
            return agree and bool(fmt.group) and self.payload.dtype == fmt.dtype
        return self.payload.dtype == fmt.dtype and fmt.scaled == bool(self.scales) and (not fmt.scaled or self.scale_inv is not None)

    def to(self, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
        """Convert to `fmt`: a ScalingTensor with the dtype `dtype`, or a plain tensor with the format's dtype."""
        if self.keeps_bits(fmt):
            return self.payload if self.scale_inv is None else ScalingTensor(self.payload, self.scale_inv.clone(), dtype)
        values = self.values()
        if not fmt.scaled:
            return values.to(fmt.dtype)
        if self.payload.dtype != fmt.dtype or not self.scales:
            return ScalingTensor.quantize(values, fmt, dtype=dtype)
        coarsest = torch.stack([scale for _, scale in self.scales]).amax()
        return ScalingTensor(quantize(values, inverse(coarsest), fmt), coarsest, dtype)

    def moment(self, fmt: Format) -> Tensor | Expanded:
        """Like `to`, but also for COAT's formats."""
        if not fmt.group:
            return self.to(fmt)
        if self.groups is None or not self.keeps_bits(fmt):
            return quantize_expanded(self.values(), fmt)
        largest, k = map(_firsts, self.groups)
        return Expanded(self.payload, largest, k)

    def check(self, folder: object, *, non_negative: bool = False) -> None:
        """Raise a ValueError for a tensor that no run can use (`tensor_rules`)."""
        if self.payload.dtype not in _DTYPES:
            raise ValueError(f"{folder}: {self.key} is {self.payload.dtype}, which is not a format of weights; load an older checkpoint")
        groups = [extents(self.groups[0]).tolist(), torch.stack(torch.aminmax(self.groups[1])).tolist()] if self.groups is not None else []
        parts = [(self.payload[part], [float(scale)]) for part, scale in self.scales] or [(self.payload, [])]
        for x, scales in parts:
            problem = tensor_problem(x, extents(x).tolist(), scales, groups, non_negative=non_negative)
            if problem is not None:
                raise ValueError(f"{folder}: {self.key}{problem}; load an older checkpoint")


def _firsts(x: Tensor) -> Tensor:
    """Return the first value of each group: [.., n] -> [.., groups]."""
    return x[..., :: STATE_GROUP.size].contiguous()


def find(stored: Stored, prefix: str, where: Sequence[Place], shape: Sequence[int], vocab_size: int) -> StoredTensor:
    """Read a local tensor of `shape` at the places `where`.

    A vocabulary with other padding is truncated, or extended by copies of its last padding row; without one, by the mean of its last
    chunk's rows, and by zeros in the moments.

    Raises:
        ValueError: if the tensor is not stored, or has another shape.
    """
    dtype = stored.tensors[f"{prefix}/{where[0].name}"].dtype if f"{prefix}/{where[0].name}" in stored.tensors else torch.uint8
    payload, scales, groups = torch.zeros(tuple(shape), dtype=dtype), [], None
    needs_scale = dtype.itemsize == 1 and prefix not in firsts()  # other FP8 tensors are meaningless without one
    for place in where:
        key = f"{prefix}/{place.name}"
        if key not in stored.tensors:
            raise ValueError(f"{stored.folder} is damaged: it has no {key}; load an older checkpoint")
        entry = stored.tensors[key]
        rows = _stored_rows(stored, key, place, vocab_size)
        target = payload[place.start : place.start + place.sizes[0]] if place.sizes else payload
        if rows is None:
            stored.read([Region(key, place.offset, target)])
        else:
            _read_padded(stored, key, place, rows, vocab_size, target)
        for chunk in entry.chunks:
            part = _overlap(place, chunk.offset, chunk.shape, rows)
            if part is not None and group_keys(key, chunk.offset)[0] in stored.tensors:
                if not (chunk.shape and dtype in _GROUPED):
                    raise ValueError(
                        f"{stored.folder}: {key} is {tuple(entry.shape)} {dtype}, but has groups, which only COAT's states in "
                        "float8_e4m3fn and float8_e5m2 have; load an older checkpoint"
                    )
                groups = groups or (torch.zeros(tuple(shape)), torch.ones(tuple(shape)))
                for target, name in zip(groups, group_keys(key, chunk.offset), strict=True):
                    target[part] = _of_elements(_fp32_beside(stored, name, STATE_GROUP.scales_shape(chunk.shape)), place, chunk, part)
            elif part is not None and (scale_key(key, chunk.offset) in stored.tensors or needs_scale):
                scales.append((part, _fp32_beside(stored, scale_key(key, chunk.offset), ())))
    return StoredTensor(f"{prefix}/{where[0].name}", payload, scales, groups)


def _fp32_beside(stored: Stored, key: str, shape: Sequence[int]) -> Tensor:
    """Read a tensor that belongs to a payload; raise a ValueError if it is not FP32 of this shape."""
    entry = stored.tensors.get(key)
    if entry is not None and (entry.dtype, entry.shape) != (torch.float32, torch.Size(shape)):
        raise ValueError(f"{stored.folder}: {key} is {tuple(entry.shape)} {entry.dtype}, not {tuple(shape)} FP32; load an older checkpoint")
    return stored.tensor(key)


def _of_elements(numbers: Tensor, place: Place, chunk: Chunk, part: tuple[slice, ...]) -> Tensor:
    """Return the values of a chunk's groups at each element of the local `part`; copies of its last row have that row's."""
    shifts = [there - here for there, here in zip(place.offset, chunk.offset, strict=True)]
    shifts[0] -= place.start
    rows = (torch.arange(part[0].start, part[0].stop) + shifts[0]).clamp(max=chunk.shape[0] - 1)
    others = [slice(of.start + shift, of.stop + shift) for of, shift in zip(part[1:], shifts[1:], strict=True)]
    return STATE_GROUP.spread(numbers, chunk.shape)[rows][(slice(None), *others)]


def find_whole(stored: Stored, prefix: str, where: Sequence[Place], shape: Sequence[int], vocab_size: int) -> StoredTensor:
    """Like `find`, but add the remainder if there is one: the sum of both in FP32."""
    tensor = find(stored, prefix, where, shape, vocab_size)
    for key, first in firsts().items():
        if first == prefix and f"{key}/{where[0].name}" in stored.tensors:
            check_remainder(stored, key, where)
            x, y = mcf.load_pair(tensor.payload, find(stored, key, where, shape, vocab_size).payload)
            return StoredTensor(tensor.key, x.float() + y.float(), [])
    return tensor


def check_remainder(stored: Stored, key: str, where: Sequence[Place]) -> None:
    """Raise a ValueError if the tensor under `key` at the places `where` is not a valid second component.

    A remainder is only meaningful with its first component (`mcf.load_pair`), which must be BF16 of the same shape.
    """
    for place in where:
        own, first = f"{key}/{place.name}", f"{firsts()[key]}/{place.name}"
        absent = next((name for name in (first, own) if name not in stored.tensors), None)
        if absent is not None:
            raise ValueError(f"{stored.folder} is damaged: it has no {absent}; load an older checkpoint")
        entry, beside = stored.tensors[own], stored.tensors[first]
        scaled = [
            name
            for name in (own, first)
            for chunk in stored.tensors[name].chunks
            if {scale_key(name, chunk.offset), *group_keys(name, chunk.offset)} & stored.tensors.keys()
        ]
        if scaled:
            raise ValueError(
                f"{stored.folder}: {scaled[0]} has a scale, which components of a pair must not have; load an older checkpoint"
            )
        if beside.dtype != BF16.dtype or entry.dtype not in (BF16.dtype, REMAINDER_E4M3.dtype) or entry.shape != beside.shape:
            raise ValueError(
                f"{stored.folder}: {own} is {tuple(entry.shape)} {entry.dtype}, but its first component {first} is {tuple(beside.shape)} "
                f"{beside.dtype}; a pair must be bfloat16, and bfloat16 or float8_e4m3fn of the same shape: load an older checkpoint"
            )


def _stored_rows(stored: Stored, key: str, place: Place, vocab_size: int) -> int | None:
    """Return the rows of a vocabulary with other padding, or None if the shape matches. Raise a ValueError for any other shape, and if it
    differs from the stored weight of this name.
    """
    size, weight = tuple(stored.tensors[key].shape), stored.tensors.get(f"model/{place.name}")
    if weight is not None and size != weight.shape:
        raise ValueError(
            f"{stored.folder} is damaged: {key} is {size}, but its weight model/{place.name} is {tuple(weight.shape)}; "
            "load an older checkpoint"
        )
    if size == place.shape:
        return None
    if (
        place.name.endswith(("word_embeddings.weight", "output_layer.weight"))
        and len(size) == len(place.shape) == 2
        and size[1] == place.shape[1]
        and min(size[0], place.shape[0]) >= vocab_size
    ):
        return size[0]
    raise ValueError(f"{stored.folder} is damaged: {key} is {size}, but the model requires {place.shape}; load an older checkpoint")


def _read_padded(stored: Stored, key: str, place: Place, rows: int, vocab_size: int, target: Tensor) -> None:
    there = max(0, min(place.sizes[0], rows - place.offset[0]))
    if there:
        stored.read([Region(key, place.offset, target[:there])])
    if there == place.sizes[0]:
        return
    if rows > vocab_size:
        first = rows - 1
    elif key.startswith(("model/", f"{MASTER.key}/")):
        # A row of zeros has logit 0, which may be far above all others; the probability of a mean row is at most the mean probability.
        first = max(chunk.offset[0] for chunk in stored.tensors[key].chunks)
    else:
        return
    last = target.new_empty((rows - first, *place.sizes[1:]))
    stored.read([Region(key, (first, *place.offset[1:]), last)])
    target[there:] = last.float().mean(0).to(last.dtype)  # keeps the bits of a single row


def _overlap(place: Place, offsets: Sequence[int], sizes: Sequence[int], rows: int | None) -> tuple[slice, ...] | None:
    """Return the slices of the local tensor that come from a chunk, or None."""
    part = []
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        last = place.offset[dim] + place.sizes[dim]
        start, end = max(offset, place.offset[dim]), min(offset + size, last)
        if dim == 0 and rows is not None and offset + size == rows < last:  # extend by copies of the last row
            end = last
        if start >= end:
            return None
        base = place.offset[dim] - (place.start if dim == 0 else 0)
        part.append(slice(start - base, end - base))
    return tuple(part)


def chunk_offsets(stored: Stored, where: Sequence[Place]) -> Iterator[tuple[Place, tuple[int, ...]]]:
    """Yield the chunks of the stored weight from which a local one is read."""
    for place in where:
        for chunk in stored.tensors[f"model/{place.name}"].chunks:
            if _overlap(place, chunk.offset, chunk.shape, None) is not None:
                yield place, chunk.offset
