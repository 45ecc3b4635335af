"""Packed conversations: which sequence takes which, and that none sees another."""

import pytest
import torch

from helpers import post_runs
from megatron.lm.post.chat import Example
from megatron.lm.post.losses import answer_loss
from megatron.lm.post.packing import batch, check_separates, fitting, packed


def example(size: int, first: int = 0) -> Example:
    return Example([(first + i) % 60 for i in range(size)], [i >= size // 2 for i in range(size)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(post_runs.toy(tmp_path_factory.mktemp("toy"))).eval()


def test_every_conversation_is_in_one_sequence_and_little_is_padding():
    given = [example(size, size) for size in (5, 9, 3, 7, 2, 6)]
    sequences = packed(given, 16)
    assert sorted(each for row in sequences for each in row) == sorted(given)
    assert [sum(len(each.tokens) for each in row) for row in sequences] == [16, 16]
    assert packed(given[::-1], 16) == sequences
    assert packed([], 16) == []


def test_a_batch_restarts_positions_and_predicts_no_first_token():
    made = batch([[example(4, 10), example(3, 20)], [example(2)]], 8, pad=63)
    assert made["input_ids"].tolist() == [[10, 11, 12, 13, 20, 21, 22, 63], [0, 1, 63, 63, 63, 63, 63, 63]]
    assert made["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert made["answer"].int().tolist() == [[0, 0, 1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0, 0]]


def test_a_conversation_that_begins_with_an_answer_is_not_predicted_from_its_neighbour():
    whole = Example([1, 2, 3], [True] * 3)
    assert batch([[whole, whole]], 6, pad=0)["answer"].int().tolist() == [[0, 1, 1, 0, 1, 1]]


@torch.no_grad()
def test_logits_do_not_depend_on_the_neighbours_in_the_pack(model):
    mine = example(7, 30)
    alone = batch([[mine]], 7, pad=0)
    want = model(input_ids=alone["input_ids"], position_ids=alone["position_ids"], use_cache=False).logits[0]
    for before, behind in ((example(5), example(4, 9)), (example(5, 40), example(4))):
        made = batch([[before, mine, behind]], 20, pad=0)
        got = model(input_ids=made["input_ids"], position_ids=made["position_ids"], use_cache=False).logits[0, 5:12]
        assert torch.allclose(got, want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_loss_of_a_pack_is_the_sum_of_its_conversations(model):
    given = [example(7, 30), example(5), example(4, 9)]

    def loss(sequences, length):
        made = batch(sequences, length, pad=0)
        logits = model(input_ids=made["input_ids"], position_ids=made["position_ids"], use_cache=False).logits
        return answer_loss(logits, made["input_ids"], made["answer"])

    apart = sum(loss([[each]], len(each.tokens)) for each in given)
    assert torch.allclose(loss([given], 20), apart, rtol=1e-6)


def test_a_model_that_does_not_is_refused(model):
    class Deaf(torch.nn.Module):
        config = model.config

        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, position_ids, use_cache):
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    with pytest.raises(ValueError, match=r"Deaf attends across packed conversations(.|\\n)*--no-packing"):
        check_separates(Deaf())


def test_long_conversations_are_refused_cut_or_dropped():
    given = [example(6), example(20), example(9)]
    with pytest.raises(ValueError, match="conversation 2 has 20 tokens, but --seq-length is 16: give --seq-length 20 or more"):
        fitting(given, 16)
    assert [len(each.tokens) for each in fitting(given, 16, "cut")] == [6, 16, 9]
    assert [len(each.tokens) for each in fitting(given, 16, "drop")] == [6, 9]
