"""The order of the data: whole epochs that no later one changes, megatron-core's in the first, and a resume that notices another."""

import copy
import dataclasses
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from helpers import tiny
from megatron.lm.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megatron.lm.config.cli import config_to_dict
from megatron.lm.data import datasets
from megatron.lm.data.datasets import build_datasets
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.data.reading.order import ORDER, check_same, description
from megatron.lm.data.tokenizers.tokenizer import NullTokenizer

VOCAB = 500
TOKENIZER = NullTokenizer(VOCAB)


def write(prefix, texts):
    options = EncodeOptions(data=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=VOCAB)
    write_datasets([Document(texts={"text": text}, source_bytes=1) for text in texts], {"text": Path(prefix)}, options, workers=0)
    return str(prefix)


def config(seq_length=16, seed=1234, train_iters=10, load=None, **data):
    made = Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=seq_length),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=1, train_iters=train_iters, seed=seed),
        data=DataConfig(**{"split": "80,20"} | data),
    )
    return dataclasses.replace(made, checkpoint=dataclasses.replace(made.checkpoint, load=load))


@pytest.fixture
def prefix(tmp_path):
    """100 documents of 4 to 18 tokens: the first 80 are 873, which is 54 sequences of 16."""
    return write(tmp_path / "p", [" ".join([str(i)] * (3 + 7 * i % 21)) for i in range(100)])


@pytest.fixture
def other(tmp_path):
    return write(tmp_path / "q", [" ".join([str(300 + i)] * (5 + i % 11)) for i in range(50)])


def train(settings, samples):
    seed = settings.training.seed
    return build_datasets(settings.data, TOKENIZER, (samples, 0, 0), seq_length=settings.model.seq_length, seed=seed)[0]


def tokens(dataset, count=None):
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset) if count is None else count)]


@pytest.mark.promise("Data", "The data order depends on seed, data and blend, not on `--train-iters`.")
def test_a_longer_run_keeps_the_order_that_was(prefix):
    settings = config(data_path=(prefix,))
    short = tokens(train(settings, 10))
    for samples in (len(short) + 1, 3 * len(short), 5 * len(short) + 7):
        longer = tokens(train(settings, samples))
        assert len(longer) >= samples
        assert longer[: len(short)] == short
        short = longer


def test_a_longer_run_keeps_the_order_of_a_blend(prefix, other):
    settings = config(data_path=("3", prefix, "1", other), split="1")
    short = tokens(train(settings, 40), 40)
    assert tokens(train(settings, 700), 40) == short


def test_one_epoch_is_that_of_megatron_core(prefix, monkeypatch, tmp_path):
    ours = train(config(data_path=(prefix,)), 10)
    monkeypatch.setattr(datasets, "Builder", BlendedMegatronDatasetBuilder)
    monkeypatch.setattr(datasets, "EpochDataset", GPTDataset)
    theirs = train(config(data_path=(prefix,), data_cache_path=str(tmp_path / "theirs")), 10)
    assert type(theirs) is GPTDataset
    assert tokens(ours) == tokens(theirs)


@pytest.mark.promise("Data", "Each epoch reads every sequence once, in its own order.")
def test_every_epoch_reads_every_sequence_once_in_an_order_of_its_own(prefix):
    dataset = train(config(data_path=(prefix,)), 200)
    each, per_epoch = dataset.sample_index.shape[0] - 1, len(train(config(data_path=(prefix,)), 1))
    assert sorted(dataset.shuffle_index.tolist()) == list(range(each))
    documents = dataset.document_index.reshape(-1, 80)
    assert all(sorted(epoch.tolist()) == list(range(80)) for epoch in documents)
    assert len({tuple(epoch.tolist()) for epoch in documents}) == len(documents) >= 3
    assert sorted(dataset.shuffle_index[:per_epoch].tolist()) == list(range(per_epoch))


@pytest.mark.parametrize("samples", [1, 2, 33])
def test_a_blend_never_draws_more_than_its_datasets_have(tmp_path, samples):
    paths = [write(tmp_path / f"b{i}", ["7 " * 15] * (1 + i)) for i in range(5)]
    blend = train(config(seq_length=15, data_path=tuple(word for path in paths for word in ("1", path)), split="1"), samples)
    for which in range(5):
        drawn = blend.dataset_sample_index[blend.dataset_index == which]
        assert len(drawn) <= len(blend.datasets[which])
    assert len(tokens(blend)) >= samples


def described(settings, samples=10):
    """The description of the training data, as a checkpoint has it."""
    return description(train(settings, samples), settings.training.seed)


def info(then, iteration=5, settings=None):
    return {"iteration": iteration, "consumed_samples": iteration, "data": then, "config": config_to_dict(settings) if settings else {}}


def compared(saved, settings, now):
    return check_same(saved, now, settings.data, seq_length=settings.model.seq_length, load=settings.checkpoint.load)


def test_what_stands_in_a_checkpoint(prefix, other):
    found = described(config(data_path=("3", prefix, "1", other), seed=7))
    assert (found["order"], found["seed"]) == (ORDER, 7)
    first, second = found["datasets"]
    assert (first["prefix"], first["weight"], first["documents"], second["weight"]) == (prefix, 0.75, [0, 80], 0.25)
    assert first["tokens"] == sum(4 + 7 * i % 21 for i in range(80))
    assert len(first["index"]) == len(first["content"]) == 64


@pytest.mark.promise("Data", "Data that was moved or renamed is the same data.")
def test_the_same_data_elsewhere_is_the_same(prefix, tmp_path):
    (tmp_path / "moved").mkdir()
    then = described(config(data_path=(prefix,)))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"p{suffix}").rename(tmp_path / "moved" / f"p{suffix}")
    settings = config(data_path=(str(tmp_path / "moved" / "p"),), split="80,19,1", train_iters=1000, load="somewhere")
    now = described(settings, 1000)
    assert compared(info(then), settings, now) is None
    os.utime(tmp_path / "moved" / "p.bin", ns=(0, 0))  # written again with the same tokens, or with others that no sample covers
    assert "p was written again" in compared(info(then), settings, described(settings, 1000))


def replaced(prefix, other):
    write(prefix, [" ".join([str(i)] * (3 + 7 * i % 21)) for i in range(99, -1, -1)])
    return config(data_path=(prefix,))


def replaced_by_the_same_lengths(prefix, other):
    write(prefix, [" ".join([str(i + 1)] * (3 + 7 * i % 21)) for i in range(100)])
    return config(data_path=(prefix,))


CHANGES = [
    (lambda prefix, other: config(data_path=(prefix,), seed=5), "--seed"),
    (lambda prefix, other: config(data_path=(other,)), "q is not the same"),
    (lambda prefix, other: config(data_path=(prefix, other)), "2 datasets"),
    (lambda prefix, other: config(data_path=(prefix,), split="90,10"), "--split"),
    (replaced, "p is not the same"),
    (replaced_by_the_same_lengths, "p has other tokens"),
]


@pytest.mark.promise("Data", "A resume with another seed, split, blend or dataset is refused without `--override-data`.")
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_change_is_refused_unless_overridden(prefix, other, change, message):
    then = described(config(data_path=(prefix,)))
    settings = change(prefix, other)
    now = described(settings)
    with pytest.raises(ValueError, match=rf"{message}.*--override-data"):
        compared(info(then), settings, now)
    allowed = dataclasses.replace(settings, data=dataclasses.replace(settings.data, override_data=True))
    assert "--override-data: the data continues at sample 5" in compared(info(then), allowed, now)
    assert compared(info(then, iteration=0), settings, now) is None


def test_other_weights_and_another_way_to_draw_are_refused(prefix, other):
    settings = config(data_path=("3", prefix, "1", other))
    now = described(settings)
    then = copy.deepcopy(now)
    then["datasets"][0]["weight"] = 0.5
    with pytest.raises(ValueError, match=r"weight 0\.75 of .*p \(saved: 0\.5\)"):
        compared(info(then), settings, now)
    with pytest.raises(ValueError, match=r"drawn as epochs apart \(saved: all at once\)"):
        compared(info(now | {"order": "all at once"}), settings, now)


@pytest.mark.promise("Data", "A resume with another `--reset-attention-mask`, `--reset-position-ids` or `--eod-mask-loss` is refused.")
@pytest.mark.parametrize(
    ("setting", "value"),
    [("reset_attention_mask", True), ("reset_position_ids", True), ("eod_mask_loss", True), ("mask_prob", 0.3), ("mask_whole_words", True)],
)
def test_other_samples_of_the_same_tokens_are_refused(prefix, setting, value):
    plain, changed = (config(data_path=(prefix,), load="somewhere", **more) for more in ({}, {setting: value}))
    now = described(plain)
    for then, settings in ((plain, changed), (changed, plain)):
        saved = info(now, settings=then)
        values = f"--{setting.replace('_', '-')} {getattr(settings.data, setting)} (saved: {getattr(then.data, setting)})"
        with pytest.raises(ValueError, match=rf"somewhere was trained on other data.*{re.escape(values)}.*--override-data to continue at"):
            compared(saved, settings, now)
        allowed = dataclasses.replace(settings, data=dataclasses.replace(settings.data, override_data=True))
        assert compared(saved, allowed, now) == f"--override-data: the data continues at sample 5 of other data: {values}"
        assert compared(saved, then, now) is None
    del saved["config"]["data"]  # written before the setting existed
    assert compared(saved, plain, now) is None
    with pytest.raises(ValueError, match=setting.replace("_", "-")):
        compared(saved, changed, now)


@pytest.mark.promise("Data", "A checkpoint without digests of its data resumes within one epoch only.")
def test_a_checkpoint_of_before_goes_on_in_its_one_epoch(prefix):
    settings = config(data_path=(prefix,), train_iters=54)
    now = described(settings, 200)
    assert "has no digests of its data" in compared(info(None, settings=settings), settings, now)
    for then, message in (
        (config(data_path=(prefix,), train_iters=55), "more than one epoch of .*p, which the version that wrote it shuffled together"),
        (config(data_path=(prefix,), seed=3), r"--seed 1234 \(saved: 3\)"),
        (config(data_path=(prefix,), split="70,30"), r"--split 80,20 \(saved: 70,30\)"),
    ):
        with pytest.raises(ValueError, match=message):
            compared(info(None, settings=then), settings, now)


def test_a_run_made_longer_past_its_epoch_reads_on(tmp_path):
    """100 sequences an epoch: 30 steps of 4 in one go, and 2 steps that were all, made 30 later."""
    corpus, again = tiny.write_data(tmp_path), {"load": str(tmp_path / "run"), "lr_warmup_iters": 1, "split": "20,75,5"}
    with tiny.trainer(tiny.config(corpus, train_iters=30, split="20,75,5")) as made:
        wanted = tokens(made.data.train, 120)
        assert made.training.data["datasets"][0]["tokens"] == 1600
    with tiny.trainer(tiny.config(corpus, train_iters=2, split="20,75,5", save=str(tmp_path / "run"))) as made:
        assert tokens(made.data.train, 8) == wanted[:8]
        made.run()
    with tiny.trainer(tiny.config(corpus, train_iters=30, **again)) as made:
        stream = made.data.training_batches(made.training)
        assert torch.cat([next(stream)["tokens"] for _ in range(28)]).tolist() == wanted[8:]
    with pytest.raises(ValueError, match=r"--seed 9 \(saved: 1234\)"), tiny.trainer(tiny.config(corpus, train_iters=6, seed=9, **again)):
        pass
    with tiny.trainer(tiny.config(corpus, train_iters=6, seed=9, override_data=True, **again)) as made:
        assert (made.training.iteration, made.training.data["seed"]) == (2, 9)


def test_indices_need_no_more_than_their_numbers(prefix):
    dataset = train(config(data_path=(prefix,)), 200)
    assert (dataset.document_index.dtype, dataset.shuffle_index.dtype) == (np.int32, np.uint32)
