"""Numbers of the documents in a sample, with `--reset-attention-mask`: tokens attend only to those with the same number.

megatron-core's GPTDataset would build a mask of s x s FP32 numbers for each sample on the host; these s numbers determine the same mask,
which `megatron.lm.model.attention.document_mask` builds on the device.
"""

from collections.abc import Sized
from typing import cast

from torch import Tensor
from torch.utils.data import Dataset

from megatron.lm.config import DataConfig
from megatron.lm.data.tokenizers.tokenizer import Tokenizer

DOCUMENTS = "documents"


def document_numbers(tokens: Tensor, eod: int) -> Tensor:
    """Return for each token the number of its document in the sample, [s] int32 from 0; the end-of-document token belongs to the document
    that it ends."""
    ends = tokens == eod
    return (ends.cumsum(0) - ends.long()).int()


class NumberedDocuments(Dataset):
    """Samples of another dataset with `documents`, [s] int32 (`document_numbers`).

    Args:
        samples: dataset with tokens [s].
        eod: the end-of-document token.
    """

    def __init__(self, samples: Dataset, eod: int) -> None:
        self.samples, self.eod = samples, eod

    def __len__(self) -> int:
        return len(cast("Sized", self.samples))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        return sample | {DOCUMENTS: document_numbers(sample["tokens"], self.eod)}


def numbered(samples: Dataset, data: DataConfig, tokenizer: Tokenizer) -> Dataset:
    """Return the samples, with numbers of their documents if the run needs them."""
    return NumberedDocuments(samples, tokenizer.eod) if data.reset_attention_mask else samples
