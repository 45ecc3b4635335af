"""A classifier on an encoder: padding has no say, pooling is what it says, pairs are cut, and strangers are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import tiny
from megatron.lm.config.sections.baselines import BASELINES
from megatron.lm.data.tokenizers.tokenizer import NullTokenizer
from megatron.lm.model.gpt import build_model
from megatron.lm.post.classifier import Classifier, Example, batch, check_encoder, check_recipe, encode_pair
from megatron.lm.processes import process_groups
from msamp.numerics.recipe import FP32, Recipe

pytestmark = pytest.mark.usefixtures("one_process")

ROWS = [Example(list(range(1, 1 + length)), length % 2) for length in (3, 15, 16)]
TOKENIZER = NullTokenizer(tiny.VOCABULARY)


def made(recipe: Recipe = FP32, pooling: str = "mean", **settings: Any) -> Classifier:
    process_groups.seed_all(7)
    config = tiny.config("unread", objective="masked-lm", init_method_std=0.1, **settings)
    classifier = Classifier(build_model(*tiny.parts(config), recipe, tiny.VOCABULARY), 2, pooling=pooling, dropout=0.5, seed=3)
    with torch.no_grad():
        classifier.out.weight.mul_(50)  # logits that differ
    return classifier.eval()


@torch.no_grad()
def logits(classifier: Classifier, rows: list[Example], positions: int = 16, fill: int = 0) -> Tensor:
    given = batch(rows, positions, fill, process_groups.device())
    del given["labels"]
    return classifier(**given)


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_a_row_has_the_logits_that_it_has_without_padding(pooling: str, positions: str):
    classifier = made(pooling=pooling, position_embedding_type=positions)
    together = logits(classifier, ROWS)
    assert together.dtype == torch.float32
    assert torch.equal(together, logits(classifier, ROWS, fill=9))  # to the bit, whatever stands there
    for row, example in enumerate(ROWS):
        tokens = torch.tensor([example.tokens], device=process_groups.device())
        places = torch.arange(len(example.tokens), device=tokens.device)[None]
        with torch.no_grad():
            alone = classifier(tokens, places, torch.ones_like(tokens, dtype=torch.bool))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)
    assert not together[0].equal(together[1])


def test_first_and_mean_are_what_they_say():
    first, mean = made(pooling="first"), made()
    given = batch(ROWS, 16, 0, process_groups.device())
    with torch.no_grad():
        hidden = first.encoder.hidden_states(given["tokens"], given["position_ids"], ~given["attended"][:, None, None, :])
        pooled = {first: hidden[0], mean: torch.stack([hidden[: len(row.tokens), i].mean(0) for i, row in enumerate(ROWS)])}
    for classifier, expected in pooled.items():
        with torch.no_grad():
            torch.testing.assert_close(logits(classifier, ROWS), classifier.out(classifier.dense(expected).tanh()), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="pooling 'last': choose one of first, mean"):
        Classifier(first.encoder, 2, pooling="last", dropout=0.0, seed=0)


def test_hidden_states_are_what_the_output_layer_is_given():
    encoder = made().encoder
    tokens = torch.arange(16, device=process_groups.device())[None]
    with torch.no_grad():
        hidden = encoder.hidden_states(tokens, tokens)
        whole = encoder(tokens, tokens, None)
        assert whole.equal(encoder.output_layer(hidden, weight=encoder.shared_embedding_or_output_weight())[0].transpose(0, 1))


def test_a_pair_is_parted_by_the_end_of_a_document_and_cut_at_its_end():
    assert encode_pair(TOKENIZER, "1 2", "3 4 5", 16, "row") == [59, 1, 2, 59, 3, 4, 5]
    assert encode_pair(TOKENIZER, "1 2", "3 4 5", 5, "row") == [59, 1, 2, 59, 3]
    with pytest.raises(ValueError, match="question in row 3 has 2 tokens, which leave none of 4 for its passage: give --seq-length 5"):
        encode_pair(TOKENIZER, "1 2", "3", 4, "row 3")
    with pytest.raises(ValueError, match="the passage in row 3 has no token"):
        encode_pair(TOKENIZER, "1 2", " ", 16, "row 3")


def test_a_gpt_and_another_vocabulary_and_a_peers_recipe_are_refused():
    config, info = tiny.config("unread", objective="masked-lm"), {"vocab_size": tiny.VOCABULARY + 1}
    check_encoder(info, config, TOKENIZER, Path("x"))
    with pytest.raises(ValueError, match=r"x contains a GPT .* --objective masked-lm"):
        check_encoder(info, replace(config, model=replace(config.model, objective="causal-lm")), TOKENIZER, Path("x"))
    with pytest.raises(ValueError, match="a vocabulary of 62 ids, but x was trained with 61"):
        check_encoder(info, config, NullTokenizer(61), Path("x"))
    peer = BASELINES["te-bf16"]
    assert peer is not None
    with pytest.raises(ValueError, match="te-bf16: Transformer Engine's attention gets no padding mask"):
        check_recipe(peer)


def test_a_batch_is_filled_to_sixteen_and_positions_stay_within_the_table():
    found = batch([Example([5, 6], 1), Example(list(range(17)), 0)], 20, 59)
    assert found["tokens"].shape == (2, 32)
    assert found["tokens"][0].tolist() == [5, 6] + [59] * 30
    assert found["attended"].sum(1).tolist() == [2, 17]
    assert found["position_ids"][0].tolist() == [*range(20), *[19] * 12]
    assert found["labels"].tolist() == [1, 0]
