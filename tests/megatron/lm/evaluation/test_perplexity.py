"""Windows that tell each token once, and the figures from them."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from helpers import texts
from megatron.lm.evaluation.models import opened
from megatron.lm.evaluation.perplexity import perplexity, windows


class Letters:
    """Each letter a token; its log-probability says how many tokens it was told by, so that a test can add them up."""

    name, seq_length, eod, about = "letters", 8, 0, {}

    def __init__(self):
        self.batches = []

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def score(self, sequences, starts):
        self.batches.append(len(sequences))
        assert all(len(sequence) <= self.seq_length + 1 for sequence in sequences)
        return [
            -torch.tensor([float(place) for place in range(start, len(sequence))])
            for sequence, start in zip(sequences, starts, strict=True)
        ]


@pytest.mark.parametrize("window", [1, 2, 7, 8])
def test_each_token_is_told_once_with_the_context_that_is_promised(window: int):
    for count, stride in itertools.product([1, 2, 3, 8, 9, 10, 50], range(1, window + 1)):
        told = []
        for begin, first, end in windows(count, window, stride):
            assert 0 <= begin < first < end <= count
            assert end - begin <= window + 1
            assert begin == 0 or first - begin >= window - stride + 1
            told += range(first, end)
        assert told == list(range(1, count))


def test_nats_bytes_and_documents_add_up():
    model = Letters()
    found = perplexity(model, ["abcd", "", "h\u00e9\u2014"], stride=4, batch_size=8)
    assert (found.documents, found.tokens, found.bytes) == (2, 7, 4 + 6)
    assert found.nats == (1 + 2 + 3 + 4) + (1 + 2 + 3)
    assert found.bits_per_byte == pytest.approx(16 / math.log(2) / 10)
    assert found.perplexity == pytest.approx(math.exp(16 / 7))
    assert found.row()["nats_per_token"] == pytest.approx(16 / 7)


def test_a_smaller_stride_tells_by_more():
    by_stride = {stride: perplexity(Letters(), ["x" * 40], stride=stride).nats for stride in (1, 4, 8)}
    # Window 8: the first tells 1 to 8, each later one its last tokens.
    assert by_stride[8] == 5 * 36
    assert by_stride[4] == 36 + 8 * (5 + 6 + 7 + 8)
    assert by_stride[1] == 36 + 32 * 8


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_the_batch_changes_nothing(batch_size: int):
    model = Letters()
    assert perplexity(model, ["x" * 40, "yz"], stride=4, batch_size=batch_size).nats == 36 + 8 * 26 + 3
    assert sum(model.batches) == 10
    assert max(model.batches) == min(batch_size, 10)


def test_a_model_with_every_token_alike_has_the_bits_of_its_vocabulary():
    class Alike(Letters):
        def score(self, sequences, starts):
            return [torch.full((len(s) - b,), -math.log(256.0)) for s, b in zip(sequences, starts, strict=True)]

    assert perplexity(Alike(), ["some text"], stride=3).bits_per_byte == pytest.approx(8)


def test_of_a_checkpoint_it_is_the_sum_of_its_scores(made: dict[str, Path]):
    with opened(made["fp32"]) as model:
        found = perplexity(model, [texts.SPEECH], stride=32)
        tokens = [model.eod, *model.encode(texts.SPEECH)]
        cut = [tokens[begin : begin + 33] for begin in range(0, len(tokens) - 1, 32)]
        # A window of the whole length that moves on by it shares but one token with the last; the last one looks back as far as it can.
        last = tokens[-33:], len(tokens) - 1 - (len(cut) - 1) * 32
        expected = sum(float(model.score([part], [1])[0].sum()) for part in cut[:-1])
        expected += float(model.score([last[0]], [33 - last[1]])[0].sum())
        one_by_one = perplexity(model, [texts.SPEECH], stride=32, batch_size=1)
    assert found.nats == pytest.approx(-expected, rel=1e-5)
    assert one_by_one.nats == pytest.approx(found.nats, rel=1e-5)
    assert found.bytes == len(texts.SPEECH.encode())
    assert 0 < found.bits_per_byte < 8


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("", {"stride": 1}, "the text is empty"),
        ("a", {"stride": 0}, "stride 0 must be between 1 and the window, 8 tokens"),
        ("a", {"stride": 9}, "stride 9 must be"),
        ("a", {"stride": 5, "window": 4}, "stride 5 must be between 1 and the window, 4"),
        ("a", {"stride": 1, "window": 9}, "window 9 must be between 1 and 8, the model's sequence length"),
        ("a", {"stride": 1, "window": 0}, "window 0"),
    ],
)
def test_what_cannot_be_told_is_refused(text: str, more: dict, message: str):
    with pytest.raises(ValueError, match=message):
        perplexity(Letters(), [text], **more)
