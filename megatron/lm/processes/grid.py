"""The grid of ranks: which ranks do something together, asked by what they do.

The processes of a run stand in a grid of data, pipeline and tensor parallelism. Code that works on the grid does not name its axes.
It asks for the ranks by their purpose:

copies      hold the same part of the model; they average its gradients and share the writing of a checkpoint
batch       read different samples of the same step
tensor      hold the shards of one layer
pipeline    hold the stages of one model
scales      share the amax histories of a layer, so that what they send each other has one scale
model       hold one whole model between them, and agree on its gradient norm and random states
embedding   hold a copy each of the tied embedding: the first and the last pipeline stage

Questions about the kind of a parameter take a parameter: which ranks average its gradient, whether this rank counts for it
in a sum over the model, which other ranks add to its gradient.

A further axis is added in two places, `process_groups.initialize`, which makes the groups, and `Grid.current`, which gives them purposes:

- Context parallelism cuts each sequence. Its ranks hold the same parameters and see other tokens, so they join `copies` and `scales`.
  They read the same samples, so `batch` stays what it is; which part of a sequence a rank takes is one more entry above.
- Expert parallelism gives each rank other experts. `gradients` and `counts` then answer by the mark of a parameter, experts among fewer
  ranks than the rest. The averaging of gradients asks for each parameter already: `build_grad_sync` refuses a model with parameters that
  are averaged over several groups, by name, until the synchroniser takes more than one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from msamp.comm.collectives import WithGroup


class Ranks(WithGroup):
    """Some of the ranks, as one of them sees them.

    Args:
        rank, size: this process among them, and how many there are.
        group: over which they talk; None where one rank is alone.

    Two of the same group are equal.
    """

    destroyed = "the process groups were left: ask `Grid.current()` again after `process_groups.initialize`"

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.rank, self.size = rank, size

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Ranks":
        """The members of a group; this process alone for None and where it is no member."""
        rank = -1 if group is None else dist.get_rank(group)
        return cls() if rank < 0 else cls(rank, dist.get_world_size(group), group)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @property
    def _key(self) -> tuple[int, int, object]:
        return self.rank, self.size, self._group


ALONE = Ranks()


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The ranks of a run by what they do together, as above; by default one process alone. `chunks`: parts of the model that a pipeline
    stage holds and takes turns with (virtual stages)."""

    copies: Ranks = ALONE
    batch: Ranks = ALONE
    tensor: Ranks = ALONE
    pipeline: Ranks = ALONE
    scales: Ranks = ALONE
    model: Ranks = ALONE
    embedding: Ranks = ALONE
    chunks: int = 1

    @classmethod
    def current(cls) -> "Grid":
        """The grid that `process_groups.initialize` has made."""
        data = Ranks.of(parallel_state.get_data_parallel_group())
        return cls(
            copies=data,
            batch=data,
            tensor=Ranks.of(parallel_state.get_tensor_model_parallel_group()),
            pipeline=Ranks.of(parallel_state.get_pipeline_model_parallel_group()),
            scales=Ranks.of(parallel_state.get_tensor_and_data_parallel_group()),
            model=Ranks.of(parallel_state.get_model_parallel_group()),
            embedding=Ranks.of(parallel_state.get_embedding_group(check_initialized=False)),
            chunks=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        )

    def gradients(self, parameter: Tensor) -> Ranks:
        """Those that average the gradient of `parameter`: all that hold a copy of it."""
        return self.copies

    def sums(self, parameters: Iterable[Tensor]) -> list[tuple[Ranks, list[Tensor]]]:
        """Those that add up gradients besides the average, each with the parameters concerned, in the order in which all ranks do it.

        The copies of a tied embedding get one part of its gradient each. Norms and biases of row-parallel layers see one part of the
        sequence each under sequence parallelism.
        """
        listed = list(parameters)
        return [
            (self.embedding, [p for p in listed if getattr(p, "shared_embedding", False)]),
            (self.tensor, [p for p in listed if getattr(p, "sequence_parallel", False)]),
        ]

    def counts(self, parameter: Tensor, *, every_copy: bool) -> bool:
        """Whether this rank counts for `parameter` where ranks are added up, so that every element of the model counts once.

        What several tensor-parallel ranks have alike counts on the first of them, a tied embedding on the first pipeline stage.

        Args:
            every_copy: True where data-parallel copies are not added to each other (a sum over `model`), or hold different elements of the
                parameter (ZeRO); False where the sum is over all ranks and all hold it, of which the first copy counts.
        """
        own = self.tensor.rank == 0 or getattr(parameter, "tensor_model_parallel", False)
        return own and not getattr(parameter, "shared", False) and (every_copy or self.gradients(parameter).rank == 0)

    def is_first_stage(self, chunk: int | None = None) -> bool:
        """Whether the model begins with this rank's part of it; `chunk`: which one, where a stage holds several."""
        return self._chunk(chunk) == 0 and self.pipeline.rank == 0

    def is_last_stage(self, chunk: int | None = None) -> bool:
        """Whether the model ends with this rank's part of it, as `is_first_stage`."""
        return self._chunk(chunk) == self.chunks - 1 and self.pipeline.rank == self.pipeline.size - 1

    def _chunk(self, chunk: int | None) -> int:
        if chunk is None and self.chunks > 1:
            raise ValueError(f"a stage holds {self.chunks} chunks of the model: say which of 0 to {self.chunks - 1} is meant")
        return chunk or 0
