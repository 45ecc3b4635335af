"""Positions of a rank's tensors in the whole model under tensor and pipeline parallelism, from megatron-core's sharding metadata."""

from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from megatron.lm.training.gradients import chunks


@dataclass(frozen=True, kw_only=True)
class Place:
    """The position of some rows of a local tensor in the tensor of the whole model.

    Attributes:
        name: in the unsharded model, such as `decoder.layers.3.mlp.linear_fc1.weight`.
        shape: of the whole tensor.
        offset: of these rows in the whole tensor.
        start: the first of these rows in the local tensor.
        sizes: of these rows.
        first: whether this is the first of the model-parallel ranks with a copy.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    start: int
    sizes: tuple[int, ...]
    first: bool

    def within(self, rows: slice | None) -> tuple[slice | None, tuple[int, ...]] | None:
        """Return the part of local `rows` (None: all) in this place, counted from the first of `rows`, and its offset; None if there is no
        overlap."""
        if not self.sizes:
            return None, self.offset
        low, high = (0, None) if rows is None else (rows.start, rows.stop)
        start = max(self.start, low)
        stop = self.start + self.sizes[0] if high is None else min(self.start + self.sizes[0], high)
        if start >= stop and self.sizes[0]:
            return None
        return slice(start - low, stop - low), (self.offset[0] + start - self.start, *self.offset[1:])


def places(model: nn.Module) -> dict[str, list[Place]]:
    """Return the places of every parameter and buffer, by its name in this rank's `model`.

    Most have one. SwiGLU's first linear layer has two: rows of the gate and rows of the other half.
    """
    by_name: dict[str, list[Place]] = {}
    parts = chunks(model)
    for number, part in enumerate(parts):
        prefix = f"{number}." if isinstance(model, nn.ModuleList) else ""
        for name, entry in part.sharded_state_dict(metadata={"non_homogeneous_layers": True}).items():
            if isinstance(entry, ShardedTensorFactory):
                # Row numbers in place of the data show which rows the parts contain.
                numbers = torch.arange(entry.data.shape[0]).reshape(-1, *[1] * (entry.data.dim() - 1)).expand(entry.data.shape)
                parts_of = entry.build_fn(entry.key, numbers, entry.replica_id, entry.flattened_range)
                by_name[prefix + name] = [_place(one, int(one.data.flatten()[0])) for one in parts_of]
            elif isinstance(entry, ShardedTensor):
                by_name[prefix + name] = [_place(entry, 0)]
    return by_name


def _place(entry: ShardedTensor, start: int) -> Place:
    replica = entry.replica_id if isinstance(entry.replica_id, tuple) else (entry.replica_id,)
    # The last number is the data-parallel rank; these replicas share the writing.
    return Place(
        name=entry.key,
        shape=tuple(entry.global_shape),
        offset=tuple(entry.global_offset),
        start=start,
        sizes=tuple(entry.local_shape),
        first=not any(replica[:-1]),
    )


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """Return the name of every parameter in this rank's `model`."""
    return {p: name for name, p in model.named_parameters()}
