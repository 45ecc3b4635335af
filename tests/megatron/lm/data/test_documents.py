"""Numbers of documents are those of megatron-core's attention mask."""

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from torch.utils.data import Dataset

from helpers import tiny
from megatron.lm.data.documents import NumberedDocuments, document_numbers, numbered
from megatron.lm.data.masked import masked
from megatron.lm.data.tokenizers.tokenizer import NullTokenizer
from megatron.lm.model.attention import document_mask

EOD = 9


@pytest.mark.parametrize("tokens", [[1, EOD, 2, 3, EOD, EOD, 4], [1, 2, 3], [EOD, 1, 2], [1, 2, EOD], [EOD, EOD]])
def test_the_mask_of_the_numbers_is_megatron_cores(tokens: list[int]):
    data = torch.tensor(tokens)
    hidden, _, positions = _get_ltor_masks_and_position_ids(data, EOD, True, True, False, True)
    numbers = document_numbers(data, EOD)
    assert numbers.dtype is torch.int32
    mask = document_mask(numbers[None], causal=True, dtype=torch.float32)
    assert mask.shape == (1, 1, len(tokens), len(tokens))
    assert torch.equal(mask[0, 0] == -torch.inf, hidden[0])
    assert bool(((mask == 0) | (mask == -torch.inf)).all())
    starts = [at for at in range(len(tokens)) if at == 0 or numbers[at] != numbers[at - 1]]
    assert [at for at in range(len(tokens)) if positions[at] == 0] == starts


def test_a_bidirectional_mask_is_the_blocks():
    mask = document_mask(torch.tensor([[0, 0, 1], [0, 1, 1]]), causal=False, dtype=torch.bfloat16)
    assert mask.dtype is torch.bfloat16
    assert (mask[:, 0] == 0).int().tolist() == [[[1, 1, 0], [1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 1], [0, 1, 1]]]


class Samples(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([1, 59, 2, 59, 3, 4])
        return {"tokens": tokens, "loss_mask": torch.ones(6), "position_ids": torch.arange(6)}


def test_only_a_run_with_the_flag_has_numbers():
    tokenizer = NullTokenizer(60)
    assert tokenizer.eod == 59
    samples = Samples()
    assert numbered(samples, tiny.config("c").data, tokenizer) is samples
    made = numbered(samples, tiny.config("c", reset_attention_mask=True).data, tokenizer)
    assert isinstance(made, NumberedDocuments)
    assert len(made) == 2
    assert made[0]["documents"].tolist() == [0, 0, 1, 1, 2, 2]


def test_masked_tokens_keep_the_numbers_of_the_text():
    data = tiny.config("c", reset_attention_mask=True, mask_prob=0.9).data
    tokenizer = NullTokenizer(60)
    sample = masked(numbered(Samples(), data, tokenizer), "masked-lm", data, tokenizer, 1234)[0]
    assert sample["documents"].tolist() == [0, 0, 1, 1, 2, 2]
