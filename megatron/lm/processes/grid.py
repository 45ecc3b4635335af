"""The grid of ranks: groups of ranks by purpose.

The processes of a run form a grid of data, pipeline, tensor, context and expert parallelism. Code does not name the axes of the grid, but
requests the ranks for a purpose:

copies         have the same part of the model; they average its gradients, shard its optimizer states under ZeRO, and share the writing of
               a checkpoint
batch          read different samples of the same step
context        read different parts of the same sequences
tensor         have the shards of one layer
pipeline       have the stages of one model
scales         share the amax histories of a layer, so that what they send each other has one scale
model          together have one whole model, but for experts; they agree on its gradient norm and random states
embedding      have a copy each of the tied embedding: the first and the last pipeline stage
experts        have different experts of the same layer, and send each other tokens
expert_tensor  have the shards of one expert
expert_copies  as `copies`, of experts
expert_model   as `model`, of experts

Methods that depend on the kind of a parameter take the parameter: which ranks average its gradient, which together have one model with it,
whether this rank counts it in a sum over the model, which other ranks add to its gradient. megatron-core marks the parameters of experts
that are spread over ranks (`allreduce = False`).

`megatron.lm.config.sections.parallel.ProcessAxes` has the sizes of the axes of a configuration, `process_groups.create_groups` creates the
groups, and `Grid.current` assigns them purposes. Who adds an axis changes these three. Experts share scales over `scales` too, so that
tokens from all ranks of `experts` have one scale.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from msamp.comm.collectives import WithGroup


class Ranks(WithGroup):
    """A group of ranks from the view of one of them.

    Args:
        rank, size: this process's rank in the group, and the group's size.
        group: the process group; None for a single rank.

    Two objects of the same group are equal.
    """

    destroyed = "the process groups were destroyed: call `Grid.current()` again after `process_groups.initialize`"

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.rank, self.size = rank, size

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Ranks":
        """Return the ranks of a group; only this process if the group is None or does not contain it."""
        rank = -1 if group is None else dist.get_rank(group)
        return cls() if rank < 0 else cls(rank, dist.get_world_size(group), group)

    def or_same(self, other: "Ranks") -> "Ranks":
        """Return `other` if it has the same ranks, else these: groups of the same ranks are equal only if they are one group."""
        same = self.group is not None and other.group is not None and _members(self.group) == _members(other.group)
        return other if same else self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @property
    def _key(self) -> tuple[int, int, object]:
        return self.rank, self.size, self._group


def _members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


ALONE = Ranks()


def is_expert(parameter: Tensor) -> bool:
    """Return whether a parameter belongs to experts that are spread over ranks, so that it has other copies than the rest."""
    return not getattr(parameter, "allreduce", True)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The ranks of a run by purpose, as above; by default a single process. `chunks`: model chunks per pipeline stage (virtual stages)."""

    copies: Ranks = ALONE
    batch: Ranks = ALONE
    context: Ranks = ALONE
    tensor: Ranks = ALONE
    pipeline: Ranks = ALONE
    scales: Ranks = ALONE
    model: Ranks = ALONE
    embedding: Ranks = ALONE
    experts: Ranks = ALONE
    expert_tensor: Ranks = ALONE
    expert_copies: Ranks = ALONE
    expert_model: Ranks = ALONE
    chunks: int = 1

    @classmethod
    def current(cls) -> "Grid":
        """Return the grid of the groups that `process_groups.initialize` created."""
        copies = Ranks.of(parallel_state.get_data_parallel_group(with_context_parallel=True))
        tensor = Ranks.of(parallel_state.get_tensor_model_parallel_group())
        model = Ranks.of(parallel_state.get_model_parallel_group())
        return cls(
            copies=copies,
            batch=Ranks.of(parallel_state.get_data_parallel_group()),
            context=Ranks.of(parallel_state.get_context_parallel_group()),
            tensor=tensor,
            pipeline=Ranks.of(parallel_state.get_pipeline_model_parallel_group()),
            scales=Ranks.of(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)),
            model=model,
            embedding=Ranks.of(parallel_state.get_embedding_group(check_initialized=False)),
            experts=Ranks.of(parallel_state.get_expert_model_parallel_group()),
            expert_tensor=Ranks.of(parallel_state.get_expert_tensor_parallel_group()).or_same(tensor),
            expert_copies=Ranks.of(parallel_state.get_expert_data_parallel_group()).or_same(copies),
            expert_model=Ranks.of(parallel_state.get_expert_tensor_model_pipeline_parallel_group()).or_same(model),
            chunks=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        )

    def gradients(self, parameter: Tensor) -> Ranks:
        """Return the ranks that average the gradient of `parameter`: all its replicas."""
        return self.expert_copies if is_expert(parameter) else self.copies

    def parts(self, parameter: Tensor) -> Ranks:
        """Return the ranks that together have one whole model, as far as it is of the kind of `parameter`: experts or the rest."""
        return self.expert_model if is_expert(parameter) else self.model

    def sums(self, parameters: Iterable[Tensor]) -> list[tuple[Ranks, list[Tensor]]]:
        """Return the ranks that sum gradients in addition to averaging, each with its parameters, in the same order on all ranks.

        Each copy of a tied embedding gets a part of its gradient. With sequence parallelism, norms and biases of row-parallel layers see a
        part of the sequence on each rank.
        """
        listed = list(parameters)
        return [
            (self.embedding, [p for p in listed if getattr(p, "shared_embedding", False)]),
            (self.tensor, [p for p in listed if getattr(p, "sequence_parallel", False)]),
        ]

    def counts(self, parameter: Tensor, *, every_copy: bool) -> bool:
        """Return whether this rank counts `parameter` in a sum over ranks, so that every element of the model counts once.

        A parameter that is the same on several tensor-parallel ranks counts on the first of them, a tied embedding on the first stage.

        Args:
            every_copy: True if the sum does not span replicas (a sum over `parts`), or if they have different elements of the
                parameter (ZeRO); False if the sum is over all ranks and all have the parameter, so that only the first replica counts.
        """
        tensor = self.expert_tensor if is_expert(parameter) else self.tensor
        own = tensor.rank == 0 or getattr(parameter, "tensor_model_parallel", False)
        return own and not getattr(parameter, "shared", False) and (every_copy or self.gradients(parameter).rank == 0)

    def is_first_stage(self, chunk: int | None = None) -> bool:
        """Return whether the model starts with this rank's part, or with its chunk number `chunk` if the stage has several."""
        return self._chunk(chunk) == 0 and self.pipeline.rank == 0

    def is_last_stage(self, chunk: int | None = None) -> bool:
        """Return whether the model ends with this rank's part, as `is_first_stage`."""
        return self._chunk(chunk) == self.chunks - 1 and self.pipeline.rank == self.pipeline.size - 1

    def _chunk(self, chunk: int | None) -> int:
        if chunk is None and self.chunks > 1:
            raise ValueError(f"a pipeline stage has {self.chunks} chunks of the model: pass `chunk` in 0 to {self.chunks - 1}")
        return chunk or 0
