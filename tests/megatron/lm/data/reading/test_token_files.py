"""Tokens read by `pread`: the same as megatron-core's own, and files that change under a run are named."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from helpers import tiny
from megatron.lm.data.reading.token_files import TokenDataset, check_ids


def test_tokens_are_those_of_megatron_core(prefix: Path):
    theirs, ours = IndexedDataset(str(prefix)), TokenDataset(str(prefix))
    for dataset in (ours, pickle.loads(pickle.dumps(ours))):
        assert len(dataset) == len(theirs) == 200
        for i in (0, 7, 199):
            assert np.array_equal(dataset[i], theirs[i])
            assert np.array_equal(dataset.get(i, offset=3, length=11), theirs.get(i, offset=3, length=11))
            assert dataset[i].dtype == theirs[i].dtype
        assert np.array_equal(dataset.get(5, offset=40, length=0), theirs.get(5, offset=40, length=0))


def test_a_file_that_ends_early_is_named(tmp_path: Path):
    prefix = tiny.write_data(tmp_path)
    dataset, size = TokenDataset(str(prefix)), os.path.getsize(f"{prefix}.bin")
    os.truncate(f"{prefix}.bin", size - 1)
    assert len(dataset[198])
    with pytest.raises(ValueError, match=rf"{prefix}.bin has {size - 1} bytes, but the run reads to byte {size}: it was truncated"):
        dataset[199]
    os.truncate(f"{prefix}.bin", 0)
    with pytest.raises(ValueError, match=r"\.bin has 0 bytes"):
        dataset[0]


READS = [
    lambda dataset: dataset[150],
    lambda dataset: dataset[3:5],
    lambda dataset: dataset.sequence_lengths[150],
    lambda dataset: dataset.document_indices[150],
]


@pytest.mark.parametrize("size", [0, 33, 34, 100, 4041])
def test_an_index_that_was_truncated_is_not_read(tmp_path: Path, size: int):
    """Its pages are mapped: a read beyond the end of the file would end the process, and one before it would return zeros."""
    prefix = tiny.write_data(tmp_path)
    dataset = TokenDataset(str(prefix))
    pickled = pickle.dumps(dataset)
    os.truncate(f"{prefix}.idx", size)
    for read in READS:
        with pytest.raises(ValueError, match=rf"{prefix}\.idx has {size} bytes, but its header requires 4042: it was changed"):
            read(dataset)
    for opened in (lambda: TokenDataset(str(prefix)), lambda: pickle.loads(pickled)):
        with pytest.raises(ValueError, match=r"corpus\.idx (has \d+ bytes, but its header requires 4042|is not an index)"):
            opened()


def test_an_index_that_is_gone_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"x\.idx cannot be read \(No such file or directory\)"):
        TokenDataset(str(tmp_path / "x"))


@pytest.mark.parametrize(("dtype", "bad"), [(np.uint16, 60), (np.int32, -1), (np.int64, 2**31 - 1)])
def test_an_id_outside_the_vocabulary_is_named(dtype: type, bad: int):
    check_ids(np.array([5, 59, 0], dtype), 60, "here")
    check_ids(np.array([], dtype), 60, "here")
    with pytest.raises(ValueError, match=rf"dataset here: token id {bad} is outside the tokenizer's \[0, 60\): here\.bin was changed"):
        check_ids(np.array([5, 59, bad, 3], dtype), 60, "here")


def test_a_read_that_was_interrupted_goes_on(prefix: Path, monkeypatch: pytest.MonkeyPatch):
    dataset, read = TokenDataset(str(prefix)), os.preadv
    whole = dataset[3]
    monkeypatch.setattr(os, "preadv", lambda file, into, offset: read(file, [memoryview(into[0]).cast("B")[:7]], offset))
    assert np.array_equal(dataset[3], whole)
