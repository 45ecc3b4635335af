"""Micro-batches: order, slices of the ranks, resume, the dropped remainder, and no random number drawn."""

import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data import Dataset

from helpers import dist
from megatron.lm.data.batch import BATCH_KEYS, batches, own_part
from megatron.lm.data.documents import DOCUMENTS
from megatron.lm.processes import cpu_home
from megatron.lm.processes.grid import ALONE, Ranks


class Counted(Dataset):
    """Sample i holds the number i, as a blend of megatron-core would give it."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        ids = torch.full((4,), i)
        return {"dataset_id": 0, "tokens": ids, "labels": ids, "loss_mask": torch.ones(4), "position_ids": torch.arange(4)}


def drawn(length=23, **options):
    options = {"micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 1} | options
    return [batch["tokens"][:, 0].tolist() for batch in batches(Counted(length), **options)]


def test_shapes_and_dtypes():
    batch = next(batches(Counted(4), micro_batch_size=3, data_parallel_rank=0, data_parallel_size=1))
    assert set(batch) == set(BATCH_KEYS) - {DOCUMENTS}  # they are there with --reset-attention-mask alone
    assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
        "tokens": ((3, 4), torch.int64),
        "labels": ((3, 4), torch.int64),
        "loss_mask": ((3, 4), torch.float32),
        "position_ids": ((3, 4), torch.int64),
    }


def test_ranks_share_a_row_and_the_remainder_is_dropped():
    ranks = [drawn(data_parallel_rank=rank, data_parallel_size=3) for rank in range(3)]
    assert ranks == [[[0, 1], [6, 7], [12, 13]], [[2, 3], [8, 9], [14, 15]], [[4, 5], [10, 11], [16, 17]]]


def test_a_global_batch_is_the_same_set_for_any_number_of_ranks():
    def global_batches(size):
        ranks = [drawn(length=24, data_parallel_rank=rank, data_parallel_size=size) for rank in range(size)]
        micro_batches = 6 // size  # of a rank, in a global batch of 12
        return [{i for rank in ranks for ids in rank[k * micro_batches : (k + 1) * micro_batches] for i in ids} for k in range(2)]

    assert global_batches(1) == global_batches(2) == global_batches(3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_goes_on_behind_what_was_consumed(num_workers):
    whole = drawn(data_parallel_size=2, data_parallel_rank=1, num_workers=num_workers)
    assert drawn(data_parallel_size=2, data_parallel_rank=1, consumed_samples=8, num_workers=num_workers) == whole[2:]


def test_signals_end_no_reader():
    stream = batches(Counted(64), micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1, num_workers=1)
    first = next(stream)
    (reader,) = multiprocessing.active_children()
    assert reader.pid is not None
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU):
        os.kill(reader.pid, number)
    assert [batch["tokens"][0, 0].item() for batch in (first, *stream)] == list(range(0, 64, 2))


def test_global_generator_is_untouched():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    drawn()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"consumed_samples": 24}, "24 samples are already consumed, but the dataset has 23"),
        ({"consumed_samples": -1}, "-1 samples"),
    ],
)
def test_bad_input_is_refused_at_the_call(change, message):
    options = {"micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 1} | change
    with pytest.raises(ValueError, match=message):
        batches(Counted(23), **options)


@pytest.mark.gpu
def test_cuda_batches_equal_cpu_batches():
    on_gpu = list(batches(Counted(8), micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1, device="cuda"))
    assert all(tensor.is_cuda for batch in on_gpu for tensor in batch.values())
    assert [batch["tokens"][:, 0].tolist() for batch in on_gpu] == drawn(length=8)


def part_of_a_rank() -> list[list[int]]:
    """Tokens and positions of this rank's part of sample 0 .. 7."""
    with cpu_home.cpu_home():
        sample = {"tokens": torch.arange(8)[None] + 10, "position_ids": torch.arange(8)[None], DOCUMENTS: torch.arange(8)[None].int()}
        part = own_part(sample, Ranks.of(torch.distributed.group.WORLD))
        assert sample["tokens"].shape == (1, 8)  # the whole batch is not changed
        assert part[DOCUMENTS] is sample[DOCUMENTS]  # attention's mask is that of whole sequences
        return [part["tokens"][0].tolist(), part["position_ids"][0].tolist()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
def test_two_ranks_have_the_outer_and_the_inner_chunks_of_a_sequence():
    outer, inner = [0, 1, 6, 7], [2, 3, 4, 5]
    assert dist.run(part_of_a_rank, 2) == [[[t + 10 for t in positions], positions] for positions in (outer, inner)]
    whole = {"tokens": torch.arange(8)[None]}
    assert own_part(whole, ALONE) is whole
