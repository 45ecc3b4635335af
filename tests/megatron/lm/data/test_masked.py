"""Masked samples: what is chosen, what becomes of it, and that it is drawn anew for each sample and alike for each run."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from helpers import tiny
from megatron.lm.config import DataConfig
from megatron.lm.data.masked import MaskedDataset, masked, model_vocabulary
from megatron.lm.data.tokenizers.tokenizer import NullTokenizer, Tokenizer

LENGTH, VOCABULARY = 1000, 101


class Words(NullTokenizer):
    """Every third id begins a word."""

    def word_begins(self) -> np.ndarray:
        return np.arange(self.vocab_size) % 3 == 0


class Samples(Dataset):
    """100 samples of `LENGTH` tokens; every 50th ends a document."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY - 1, (LENGTH,), generator=torch.Generator().manual_seed(index))
        tokens[::50] = VOCABULARY - 1
        return {"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": torch.ones(LENGTH), "position_ids": torch.arange(LENGTH)}


def of(tokenizer: Tokenizer | None = None, **options: Any) -> MaskedDataset:
    values = {"seed": 1, "probability": 0.15, "whole_words": False} | options
    return MaskedDataset(Samples(), tokenizer or NullTokenizer(VOCABULARY), **values)


def test_labels_are_the_text_and_the_loss_counts_what_was_chosen():
    dataset, plain = of(), Samples()
    assert len(dataset) == 100
    for i in range(5):
        sample, text = dataset[i], plain[i]["tokens"]
        assert sample["labels"].equal(text)
        assert sample["position_ids"].equal(torch.arange(LENGTH))
        assert {key: x.dtype for key, x in sample.items()} == {
            "tokens": torch.int64,
            "labels": torch.int64,
            "loss_mask": torch.float32,
            "position_ids": torch.int64,
        }
        assert sample["loss_mask"].sum() == round(0.15 * 980)
        assert sample["tokens"][sample["loss_mask"] == 0].equal(text[sample["loss_mask"] == 0])
        assert sample["loss_mask"][::50].sum() == 0  # the end of a document is not asked for


def test_of_the_chosen_80_in_100_are_masked_10_are_others_and_10_stay():
    dataset, plain = of(), Samples()
    found = {"mask": 0, "stays": 0, "other": 0}
    for i in range(100):
        sample, text = dataset[i], plain[i]["tokens"]
        chosen = sample["loss_mask"] == 1
        seen, labels = sample["tokens"][chosen], text[chosen]
        found["mask"] += int((seen == VOCABULARY).sum())
        found["stays"] += int((seen == labels).sum())
        found["other"] += int(((seen != labels) & (seen != VOCABULARY)).sum())
    total = sum(found.values())
    assert total == 100 * 147
    shares = {key: count / total for key, count in found.items()}
    assert shares == pytest.approx({"mask": 0.8, "stays": 0.1, "other": 0.1}, abs=0.01)


def test_the_choice_belongs_to_the_seed_and_the_sample():
    first, again, other = of()[3], of()[3], of(seed=2)[3]
    assert all(first[key].equal(again[key]) for key in first)
    assert not first["loss_mask"].equal(other["loss_mask"])
    assert not of()[4]["loss_mask"].equal(first["loss_mask"])


def test_whole_words_are_chosen_whole_and_within_documents():
    tokenizer = Words(VOCABULARY)
    dataset, plain, begins = of(tokenizer, whole_words=True), Samples(), tokenizer.word_begins()
    for i in range(10):
        chosen, text = dataset[i]["loss_mask"].numpy() == 1, plain[i]["tokens"].numpy()
        for place in range(1, LENGTH):
            if place % 50 and (place - 1) % 50 and not begins[text[place]]:  # goes on with the word of the token before
                assert chosen[place] == chosen[place - 1]
        assert 0.1 * 980 < chosen.sum() <= round(0.15 * 980)
        assert not chosen[::50].any()


def test_one_long_word_is_chosen_all_the_same():
    class OneWord(NullTokenizer):
        def word_begins(self) -> np.ndarray:
            return np.zeros(self.vocab_size, dtype=bool)

    class One(Samples):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"tokens": torch.zeros(8, dtype=torch.int64), "position_ids": torch.arange(8)}

    sample = MaskedDataset(One(), OneWord(4), seed=1, probability=0.15, whole_words=True)[0]
    assert sample["loss_mask"].sum() == 8


def test_nothing_but_ends_of_documents_gives_nothing_to_predict():
    class Ends(Samples):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"tokens": torch.full((8,), 3), "position_ids": torch.arange(8)}

    for whole_words in (False, True):
        sample = MaskedDataset(Ends(), NullTokenizer(4), seed=1, probability=0.5, whole_words=whole_words)[0]
        assert sample["loss_mask"].sum() == 0
        assert sample["tokens"].tolist() == [3] * 8


def test_the_mask_is_an_id_of_its_own_unless_the_tokenizer_has_one():
    tokenizer = NullTokenizer(tiny.VOCABULARY)
    assert model_vocabulary("masked-lm", tokenizer) == tiny.VOCABULARY + 1
    assert model_vocabulary("causal-lm", tokenizer) == tiny.VOCABULARY
    tokenizer.mask = 7
    assert model_vocabulary("masked-lm", tokenizer) == tiny.VOCABULARY
    samples = Samples()
    made = masked(samples, "masked-lm", DataConfig(), tokenizer, 1234)
    assert isinstance(made, MaskedDataset)
    assert made.mask == 7
    assert masked(samples, "causal-lm", DataConfig(), tokenizer, 1234) is samples
