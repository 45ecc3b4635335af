"""--mock-data in whole runs through the entry point: training, evaluation, resume bit for bit, two processes, and its refusals."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

from helpers import dist, tiny
from megatron.lm.config import DEFAULT_SPLIT
from megatron.lm.data.datasets import build_datasets
from megatron.lm.data.tokenizers.tokenizer import NullTokenizer

FLAGS = shlex.split(
    "--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 128 --vocab-size 60 --tokenizer-type NullTokenizer "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 5e-3 --eval-iters 1 --eval-interval 3 --log-interval 1 --opt-level O2 "
    "--fp8-min-gain 0"
)

# Sequences of 128 tokens: the order of millions of shorter ones took half the time of a run.
MOCK: dict[str, Any] = {"data_path": [], "mock_data": True, "split": DEFAULT_SPLIT, "seq_length": 128}


pytestmark = pytest.mark.usefixtures("alone")


def run(folder: Path, *flags: str) -> list[dict[str, Any]]:
    return tiny.command(folder, *FLAGS, *flags)


def evaluations(rows: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    return [(row["kind"], row["iteration"], row["loss"]) for row in rows if row["kind"] in ("valid", "test")]


@pytest.mark.promise("Data", "`--mock-data` trains on megatron-core's mock documents and resumes bit for bit.")
def test_it_trains_evaluates_and_resumes_bit_for_bit(tmp_path: Path):
    whole = run(tmp_path)
    saved = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    first = run(tmp_path, "--save", str(tmp_path / "saved"), "--exit-interval", "2")
    second = run(tmp_path, *saved)
    assert len(tiny.losses(whole)) == 6
    assert tiny.losses(first) + tiny.losses(second) == tiny.losses(whole)
    assert tiny.losses(whole)[-1] < tiny.losses(whole)[0] - 0.1
    assert evaluations(second) == evaluations(whole)
    assert [entry[:2] for entry in evaluations(whole)] == [("valid", 3), ("valid", 6), ("test", 6)]
    assert not (tmp_path / "index_cache").exists()


def trained() -> list[float]:
    return tiny.losses(tiny.run(tiny.config("", **MOCK, train_iters=4, global_batch_size=16)))


def test_two_processes_read_what_one_reads():
    one = trained()
    two = dist.run(trained, 2)
    assert two[0] == pytest.approx(one, abs=0.02)


def test_the_samples_are_windows_of_megatron_core_s_mock_documents():
    """A document counts from 1, modulo the vocabulary, and its last token is the end of document, wherever that falls."""
    source = MockGPTLowLevelDataset(NullTokenizer(60))
    assert source[0][:-1].tolist() == [(i + 1) % 60 for i in range(len(source[0]) - 1)]
    assert source[0][-1] == 59
    settings = tiny.config("", **MOCK)
    train, valid, test = build_datasets(settings.data, NullTokenizer(60), (50, 2, 0), seq_length=settings.model.seq_length, seed=1234)
    for i in range(50):
        sample = train[i]
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        steps = {(int(b) - int(a)) % 60 for a, b in zip(sample["tokens"], sample["labels"], strict=True) if b != 59 and a != 59}
        assert steps <= {1}
    assert train.indices[-1] == 33332  # a third of 100,000 documents: megatron-core cuts mock data so, whatever --split
    assert valid.indices[0] == 33333
    assert test is None
