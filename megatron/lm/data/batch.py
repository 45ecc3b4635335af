"""Micro-batches of one data-parallel rank, in a deterministic order, resumable from the number of consumed samples."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.lm.data.documents import DOCUMENTS
from megatron.lm.processes.grid import ALONE, Ranks
from megatron.lm.shell.exit_codes import SAVE_SIGNALS

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", DOCUMENTS)


@dataclass(frozen=True, kw_only=True)
class MicroBatchSampler:
    """Batch sampler for torch's DataLoader with the indices of one rank's micro-batches.

    Samples are read in order, in rows of micro_batch_size x data_parallel_size; rank r takes the r-th micro-batch of a row. A global
    batch is therefore the same set of samples for any number of ranks. An incomplete row is dropped; no sample repeats.

    Raises:
        ValueError: consumed_samples outside [0, total_samples].
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.consumed_samples <= self.total_samples:
            raise ValueError(
                f"{self.consumed_samples} samples are already consumed, but the dataset has {self.total_samples}: "
                "raise --train-iters, or load the checkpoint with the data it was trained on"
            )

    @property
    def row(self) -> int:
        """Number of samples that all ranks together read per micro-batch."""
        return self.micro_batch_size * self.data_parallel_size

    def __len__(self) -> int:
        return (self.total_samples - self.consumed_samples) // self.row

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        for start in range(first, first + len(self) * self.row, self.row):
            yield list(range(start, start + self.micro_batch_size))


def batches(
    dataset: Dataset,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    consumed_samples: int = 0,
    num_workers: int = 0,
    device: torch.device | str = "cpu",
    context: Ranks = ALONE,
) -> Iterator[dict[str, Tensor]]:
    """Return an iterator over this rank's micro-batches, on `device`, until the dataset has no full row left.

    Args:
        dataset: from `build_datasets`; only `len` and `[i]` are used.
        consumed_samples: samples that all ranks together have already read; a resumed run continues after them.
        num_workers: number of prefetch processes; 0 reads in this process.
        device: for a CUDA device, batches are copied asynchronously from pinned memory.
        context: the ranks that have the parts of the same sequences (`own_part`).

    Returns:
        An iterator over tokens, labels, position_ids [b, s] int64 and loss_mask [b, s] float32, and documents [b, s] int32 if the samples
        have them. It draws no random number. It raises a ValueError if a sample cannot be read.

    Raises:
        ValueError: as MicroBatchSampler; at the call, not at the first batch.
    """
    device = torch.device(device)
    sampler = MicroBatchSampler(
        total_samples=len(cast("Sized", dataset)),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
    )
    loader = DataLoader(
        _Guarded(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_collate,
        pin_memory=device.type == "cuda",
        worker_init_fn=_ignore_signals,
        # The loader has its own generator: otherwise it would draw its base seed from the global one, and shift dropout after a resume.
        generator=torch.Generator().manual_seed(0),
    )
    return (own_part(batch, context) for batch in _on_device(loader, device))


def own_part(batch: dict[str, Tensor], context: Ranks) -> dict[str, Tensor]:
    """Return this rank's part of whole sequences: of 2 N equal chunks, rank r of N has chunks r and 2 N - 1 - r, in this order, so that
    causal attention is the same work for all. The documents' numbers stay whole, since attention's mask covers whole sequences.

    Args:
        batch: [b, s, ..] each; 2 N divides s.
        context: the N ranks that share the sequences.
    """
    if context.size == 1:
        return batch
    chunks = [context.rank, 2 * context.size - 1 - context.rank]
    return {name: x if name == DOCUMENTS else x.unflatten(1, (2 * context.size, -1))[:, chunks].flatten(1, 2) for name, x in batch.items()}


def _ignore_signals(worker: int) -> None:
    # A batch system sends signals to all processes of a job: the training process must still get its batches until it has saved.
    # They would also end readers that are not forked.
    for number in (signal.SIGTERM, *SAVE_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class _Unreadable:
    """What a worker sends in place of a sample that cannot be read: an exception would arrive as a traceback of many lines."""

    problem: str


class _Guarded(Dataset):
    """A dataset that returns `_Unreadable` where it would raise an OSError or a ValueError."""

    def __init__(self, samples: Dataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(cast("Sized", self.samples))

    def __getitem__(self, index: int) -> dict[str, Tensor] | _Unreadable:
        try:
            return self.samples[index]  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            return _Unreadable(str(error))


def _collate(samples: list[dict[str, Tensor] | _Unreadable]) -> dict[str, Tensor] | _Unreadable:
    """Stack the model's inputs; a blend's `dataset_id` is dropped."""
    readable: list[dict[str, Tensor]] = []
    for sample in samples:
        if isinstance(sample, _Unreadable):
            return sample
        readable.append(sample)
    return default_collate([{key: sample[key] for key in BATCH_KEYS if key in sample} for sample in readable])


def _on_device(loader: DataLoader, device: torch.device) -> Iterator[dict[str, Tensor]]:
    for batch in loader:
        if isinstance(batch, _Unreadable):
            raise ValueError(batch.problem)
        yield {key: tensor.to(device, non_blocking=device.type == "cuda") for key, tensor in batch.items()}
