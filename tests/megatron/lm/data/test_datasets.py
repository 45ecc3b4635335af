"""Datasets: samples against the written tokens, splits, blends, caches, several ranks, and every bad input."""

import dataclasses
import json
import struct

import numpy as np
import pytest
import torch

from helpers import dist
from helpers.kills import killed_at_a_rename
from megatron.lm.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megatron.lm.data.datasets import build_datasets
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.data.tokenizers.tokenizer import NullTokenizer

VOCAB = 500
TOKENIZER = NullTokenizer(VOCAB)


def write(prefix, texts, vocab_size=VOCAB):
    options = EncodeOptions(data=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=vocab_size)
    write_datasets([Document(texts={"text": text}, source_bytes=1) for text in texts], {"text": prefix}, options, workers=0)
    return str(prefix)


def counted(documents, first=0, length=19):
    """Documents of consecutive numbers: any window of one is recognisable."""
    return [" ".join(str((first + i * length + j) % (VOCAB - 1)) for j in range(length)) for i in range(documents)]


def config(seq_length=16, **data):
    return Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=seq_length),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=1, train_iters=1),
        data=DataConfig(**data),
    )


def built(settings, tokenizer, counts):
    return build_datasets(settings.data, tokenizer, counts, seq_length=settings.model.seq_length, seed=settings.training.seed)


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "p", counted(100))


def test_samples_are_windows_of_the_text(prefix):
    train, valid, test = built(config(data_path=(prefix,), split="80,15,5"), TOKENIZER, (10, 4, 2))
    for dataset, wanted in ((train, 10), (valid, 4), (test, 2)):
        assert len(dataset) >= wanted
        for i in range(wanted):
            sample = dataset[i]
            assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}
            assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
            steps = (sample["labels"] - sample["tokens"])[(sample["labels"] != TOKENIZER.eod) & (sample["tokens"] != TOKENIZER.eod)]
            assert set(steps.tolist()) <= {1, 1 - (VOCAB - 1)}
            assert sample["loss_mask"].tolist() == [1.0] * 16
            assert sample["position_ids"].tolist() == list(range(16))


def test_splits_share_no_document(tmp_path):
    prefix = write(tmp_path / "p", [" ".join([str(i)] * 20) for i in range(100)])
    train, valid, _ = built(config(data_path=(prefix,), split="80,20"), TOKENIZER, (90, 20, 0))
    seen = [{int(token) for i in range(len(dataset)) for token in dataset[i]["tokens"]} - {TOKENIZER.eod} for dataset in (train, valid)]
    assert max(seen[0]) == 79
    assert min(seen[1]) == 80


def test_order_depends_on_the_seed_alone(tmp_path, prefix):
    def first(seed, cache):
        base = config(data_path=(prefix,), split="100", data_cache_path=str(tmp_path / cache))
        changed = dataclasses.replace(base, training=dataclasses.replace(base.training, seed=seed))
        train = built(changed, TOKENIZER, (50, 0, 0))[0]
        return [train[i]["tokens"].tolist() for i in range(20)]

    assert first(1, "a") == first(1, "b")
    assert first(1, "a") != first(2, "a")


def test_eod_mask_and_reset_positions(prefix):
    train, _, _ = built(config(data_path=(prefix,), split="1", eod_mask_loss=True, reset_position_ids=True), TOKENIZER, (50, 0, 0))
    sample = next(sample for sample in (train[i] for i in range(50)) if TOKENIZER.eod in sample["tokens"][:-1].tolist())
    end = sample["tokens"].tolist().index(TOKENIZER.eod)
    assert sample["loss_mask"][end] == 0
    assert sample["position_ids"].tolist() == [*range(end + 1), *range(15 - end)]


def test_none_where_a_split_is_empty_or_not_wanted(prefix):
    train, valid, test = built(config(data_path=(prefix,), split="9,1,0"), TOKENIZER, (5, 0, 5))
    assert len(train) >= 5
    assert valid is None
    assert test is None


def test_separate_data_of_the_splits(tmp_path, prefix):
    other = write(tmp_path / "v", ["7 " * 40])
    train, valid, test = built(config(train_data_path=(prefix,), valid_data_path=(other,)), TOKENIZER, (5, 2, 2))
    assert len(train) >= 5
    assert set(valid[0]["tokens"].tolist()) <= {7, TOKENIZER.eod}
    assert test is None


@pytest.mark.parametrize(("words", "share"), [(("3", "a", "1", "b"), 0.75), (("a", "b"), 0.8)])
def test_blend_draws_by_weight_or_by_size_and_repeats(tmp_path, words, share):
    write(tmp_path / "a", ["1 " * 19] * 80)
    write(tmp_path / "b", ["2 " * 19] * 20)
    paths = tuple(word if word.isdigit() else str(tmp_path / word) for word in words)
    train, _, _ = built(config(data_path=paths, split="1"), TOKENIZER, (400, 0, 0))
    assert len(train) >= 400
    from_a = sum(1 in train[i]["tokens"].tolist() for i in range(400)) / 400
    assert abs(from_a - share) < 0.02


def test_new_data_under_an_old_name_gets_new_indices(tmp_path, prefix):
    settings = config(data_path=(prefix,), split="1", data_cache_path=str(tmp_path / "cache"))
    assert len(built(settings, TOKENIZER, (20, 0, 0))[0]) == 124
    write(tmp_path / "p", counted(40))
    assert len(built(settings, TOKENIZER, (20, 0, 0))[0]) == 49


@pytest.mark.parametrize("renames", [1, 3])
def test_a_kill_during_the_first_start_is_survived(tmp_path, prefix, renames):
    """SIGKILL when so many files of the cache have their names, whatever lies beside them."""
    settings = config(data_path=(prefix,), split="1")
    assert killed_at_a_rename(renames, lambda: built(settings, TOKENIZER, (20, 0, 0)))
    assert len(built(settings, TOKENIZER, (20, 0, 0))[0]) == 124


@pytest.mark.promise("Data", "Invalid counts next to a dataset (`PREFIX.json`) are refused before the first step.")
@pytest.mark.parametrize("content", ["{", "{}", "\xff"])
def test_bad_counts_are_refused_before_the_first_step(tmp_path, prefix, content):
    (tmp_path / "p.json").write_text(content, encoding="latin-1")
    refused(r"p\.json .*delete the file", data_path=(prefix,))
    counts = {"documents": 1, "tokens": 5, "text_bytes": 0, "vocab_size": 2, "dtype": "uint16"}
    (tmp_path / "p.json").write_text(json.dumps(counts))
    refused(r"counts 5 tokens and 0 bytes of text; .*delete the file", data_path=(prefix,))
    (tmp_path / "p.json").unlink()
    built(config(data_path=(prefix,)), TOKENIZER, (5, 0, 0))


def first_tokens(blend, prefix):
    """Runs on every rank: samples of a blend, and the error when the last rank alone names a file that is not there."""
    train = built(config(data_path=blend, split="1"), TOKENIZER, (30, 0, 0))[0]
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    with pytest.raises(ValueError, match="does not exist") as caught:
        built(config(data_path=("nowhere" if last else prefix,)), TOKENIZER, (5, 0, 0))
    return [train[i]["tokens"].tolist() for i in range(10)], str(caught.value)


def test_ranks_get_the_same_samples_and_the_same_error(tmp_path, prefix):
    other = write(tmp_path / "q", counted(30, first=50))
    first, second = dist.run(first_tokens, 2, ("1", prefix, "2", other), prefix)
    assert first == second
    assert "nowhere.bin does not exist" in first[1]


def refused(message, seq_length=16, counts=(5, 0, 0), tokenizer=TOKENIZER, **data):
    with pytest.raises(ValueError, match=message):
        built(config(seq_length, **data), tokenizer, counts)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_and_empty_files(tmp_path, prefix, suffix):
    path = tmp_path / f"p{suffix}"
    path.write_bytes(b"")
    refused(rf"p\{suffix} is empty.*msamp preprocess", data_path=(prefix,))
    path.unlink()
    refused(rf"p\{suffix} does not exist.*msamp preprocess", data_path=(prefix,))
    assert not (tmp_path / "index_cache").exists()


def test_truncated_and_overlong_data(tmp_path, prefix):
    content = (tmp_path / "p.bin").read_bytes()
    (tmp_path / "p.bin").write_bytes(content[:-2])
    refused(r"is truncated: it has 3998 of the 4000 bytes", data_path=(prefix,))
    (tmp_path / "p.bin").write_bytes(content + b"\0\0")
    refused(r"do not belong together", data_path=(prefix,))


@pytest.mark.promise("Data", "A damaged index or data file of a dataset is refused in one line.")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"not an index at all, but long enough", "is not an index of megatron-core"),
        (lambda raw: raw[:20], "is not an index of megatron-core"),
        (lambda raw: raw[:-1], "has 2041 bytes, but its header requires 2042"),
        (lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "has version 2"),
        (lambda raw: raw[:17] + b"\x07" + raw[18:], "dtype code 7"),
        (lambda raw: raw[:-8] + struct.pack("<q", 7), "document boundaries"),
        (lambda raw: raw[:434] + struct.pack("<q", -40) + raw[442:], "points outside"),
        (lambda raw: raw[:442] + struct.pack("<q", 2**63 - 2) + raw[450:], "points outside"),
        (lambda raw: raw[:442] + struct.pack("<q", 2**40) + raw[450:], "is truncated"),
        (lambda raw: raw[:18] + struct.pack("<QQq", 0, 1, 0), "lists no tokens"),
    ],
)
def test_bad_index(tmp_path, prefix, change, message):
    raw = (tmp_path / "p.idx").read_bytes()
    (tmp_path / "p.idx").write_bytes(change(raw))
    refused(message, data_path=(prefix,))


@pytest.mark.promise("Data", "A token id outside the vocabulary ends the run with one line when its sample is read.")
@pytest.mark.parametrize("wrong", [69999, -3])
def test_ids_outside_the_vocabulary(tmp_path, wrong):
    wide = write(tmp_path / "wide", ["69999 " * 40], vocab_size=100000)
    np.full(41, wrong, dtype=np.int32).tofile(f"{wide}.bin")
    train, _, _ = built(config(data_path=(wide,), split="1"), TOKENIZER, (2, 0, 0))
    with pytest.raises(ValueError, match=rf"wide: token id {wrong} is outside"):
        train[0]


def test_sequence_longer_than_a_split(prefix):
    refused(r"train split of .*p has 2000 tokens in 100 documents; --seq-length 2000 needs 2001", 2000, data_path=(prefix,), split="1")
    refused(r"the valid split of .* has 20 tokens in 1 documents", 64, (5, 5, 0), data_path=(prefix,), split="99,1,0")
    refused(r"the test split of .* has no document: 100 documents are too few", 16, (5, 5, 5), data_path=(prefix,), split="9990,1000,1")


def test_contradictory_paths(prefix):
    refused("contradict each other", data_path=(prefix,), train_data_path=(prefix,))
    refused("no data: set --data-path")
    refused("no training data", data_path=(prefix,), split="0,1,0")
    refused("no training data", valid_data_path=(prefix,))


def test_cache_that_cannot_be_written(tmp_path, prefix):
    (tmp_path / "file").touch()
    refused("--data-cache-path", data_path=(prefix,), data_cache_path=str(tmp_path / "file"))
