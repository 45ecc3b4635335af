"""Masked language modeling: the model predicts only the masked tokens of a sample (BERT, Devlin et al. 2019; RoBERTa, Liu et al. 2019).

A sample is a sequence of the same packed text as for GPT: documents are concatenated and cut into sequences, in the order of `order`
(RoBERTa's FULL-SENTENCES across documents, section 4.2). A fraction `--mask-prob` of its tokens is selected, 15 % by default, at least one.
80 % of the selected tokens become the mask token, 10 % a random token of the vocabulary, and 10 % are unchanged (BERT, appendix A.1). The
labels are the original tokens, and the loss covers only the selected ones. There is no next-sentence prediction (RoBERTa, section 4.2).

The selection is drawn from the seed and the number of the sample in the run, so a text that repeats in a later epoch is masked differently
(dynamic masking, RoBERTa section 4.1), and a resumed run masks the same tokens as an uninterrupted one.

`--mask-whole-words` selects words, with all tokens of a word (whole word masking of BERT's later checkpoints). A token begins a word if its
text begins with a space, or, in a WordPiece vocabulary, if it does not begin with "##".
"""

from __future__ import annotations

from collections.abc import Sized
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.lm.config import DataConfig
from megatron.lm.data.documents import DOCUMENTS
from megatron.lm.data.tokenizers.tokenizer import Tokenizer

MASKED = "masked-lm"
KEPT, REPLACED = 0.1, 0.1  # fractions of the selected tokens that are unchanged, and that become a random token


def model_vocabulary(objective: str, tokenizer: Tokenizer) -> int:
    """Return the vocabulary size of the model: the tokenizer's, plus one id for the mask if the tokenizer has none."""
    return tokenizer.vocab_size + (objective == MASKED and tokenizer.mask is None)


class MaskedDataset(Dataset):
    """Samples of another dataset with some tokens masked.

    `self[i]` contains tokens, labels, position_ids [s] int64 and loss_mask [s] float32, 1 at the selected tokens; and documents if the
    other dataset has them.

    Args:
        samples: dataset with tokens, loss_mask and position_ids [s]; its labels are not used.
        tokenizer: of the text.
        seed: of the selection.
        probability: fraction of a sample's tokens to select, in (0, 1).
        whole_words: select whole words.
    """

    def __init__(self, samples: Dataset, tokenizer: Tokenizer, *, seed: int, probability: float, whole_words: bool) -> None:
        self.samples, self.seed, self.probability = samples, seed, probability
        self.eod, self.vocab_size = tokenizer.eod, tokenizer.vocab_size
        self.mask = tokenizer.vocab_size if tokenizer.mask is None else tokenizer.mask
        self.begins_word = tokenizer.word_begins() if whole_words else None

    def __len__(self) -> int:
        return len(cast("Sized", self.samples))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        tokens = sample["tokens"].numpy()
        draw = np.random.default_rng([self.seed, index])
        chosen = self._chosen(tokens, draw)
        seen, fate = tokens.copy(), draw.random(len(chosen))
        seen[chosen] = self.mask
        seen[chosen[fate < REPLACED]] = draw.integers(self.vocab_size, size=int((fate < REPLACED).sum()))
        stays = chosen[fate >= 1 - KEPT]
        seen[stays] = tokens[stays]
        loss_mask = np.zeros(len(tokens), np.float32)
        loss_mask[chosen] = 1.0
        return {
            "tokens": torch.from_numpy(seen),
            "labels": sample["tokens"].clone(),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": sample["position_ids"],
        } | {key: sample[key] for key in (DOCUMENTS,) if key in sample}

    def _chosen(self, tokens: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Return the positions of the tokens to predict; none is an end-of-document token."""
        places = np.flatnonzero(tokens != self.eod)
        if not len(places):
            return places
        wanted = max(1, round(self.probability * len(places)))
        if self.begins_word is None:
            return draw.permutation(places)[:wanted]
        # A word extends to the next word, and not beyond its document.
        begins = self.begins_word[tokens[places]] | (np.diff(places, prepend=-2) > 1)
        words = np.split(places, np.flatnonzero(begins)[1:])  # the first position begins a word
        order = draw.permutation(len(words))
        sizes = np.cumsum([len(words[i]) for i in order])
        taken = max(1, int(np.searchsorted(sizes, wanted, side="right")))  # at most the requested number, unless the first word is longer
        return np.concatenate([words[i] for i in order[:taken]])


def masked(samples: Dataset, objective: str, data: DataConfig, tokenizer: Tokenizer, seed: int) -> Dataset:
    """Return the samples for the run's objective: unchanged, or masked."""
    if objective != MASKED:
        return samples
    return MaskedDataset(samples, tokenizer, seed=seed, probability=data.mask_prob, whole_words=data.mask_whole_words)
