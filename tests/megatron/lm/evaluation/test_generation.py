"""Sampling against a model whose answers are known, and against the softmax."""

import copy
import pickle

import pytest
import torch

from megatron.lm.evaluation.generation import Generated, Sampling, draw, generate

VOCAB, PADDED, EOD = 10, 16, 9


def liked(tokens: torch.Tensor) -> torch.Tensor:
    """Likes the successor of each token best, then the one after it; loves the padding."""
    logits = torch.zeros(len(tokens), PADDED)
    logits[:, VOCAB:] = 100.0
    logits.scatter_(-1, ((tokens + 1) % VOCAB).unsqueeze(-1), 9.0)
    return logits.scatter_(-1, ((tokens + 2) % VOCAB).unsqueeze(-1), 8.0)


class Counting:
    """A decoder that counts; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def prefill(self, sequences):
        self.asked.append([list(sequence) for sequence in sequences])
        return liked(torch.tensor([sequence[-1] for sequence in sequences]))

    def step(self, tokens):
        self.asked.append(tokens.tolist())
        return liked(tokens)


def made(prompts, n, decoder=None, **more) -> Generated:
    options = {"seq_length": 8, "vocab_size": VOCAB} | {key: more.pop(key) for key in ("seq_length", "eod") if key in more}
    return generate(decoder or Counting(), prompts, n, Sampling(**more), **options)


def test_greedy_follows_the_model_for_each_sequence():
    assert made([[1], [2, 7]], 4, temperature=0).tokens == [[2, 3, 4, 5], [8, 9, 0, 1]]
    assert made([[3]], 3, top_k=1).tokens == [[4, 5, 6]]
    nothing = made([[3]], 0)
    assert nothing.tokens == [[]]
    assert nothing.new_tokens == 0


def test_the_end_of_document_ends_one_and_not_the_others():
    found = made([[7], [1]], 4, temperature=0, eod=EOD)
    assert found.tokens == [[8], [2, 3, 4, 5]]
    assert found.ended == [True, False]
    assert found.new_tokens == 2 + 4
    decoder = Counting()
    assert made([[7], [6]], 5, decoder, temperature=0, eod=EOD).tokens == [[8], [7, 8]]
    assert decoder.asked == [[[7], [6]], [8, 7], [9, 8]], "nothing is asked once all have ended"


def test_a_full_context_forgets_its_older_half():
    decoder = Counting()
    found = made([[1, 2, 3], [5]], 4, decoder, temperature=0, seq_length=4)
    assert found.tokens == [[4, 5, 6, 7], [6, 7, 8, 9]]
    assert decoder.asked == [[[1, 2, 3], [5]], [4, 6], [[4, 5], [5, 6, 7]], [6, 8]]


def test_a_seed_decides_and_each_sequence_draws_as_it_does_alone():
    prompts = [[1], [4], [1]]
    together = made(prompts, 30, seed=5, temperature=3.0).tokens
    assert together == made(prompts, 30, seed=5, temperature=3.0).tokens
    assert together != made(prompts, 30, seed=6, temperature=3.0).tokens
    assert together[0] != together[2], "the same prompt again is drawn anew"
    for i, prompt in enumerate(prompts):
        assert made([prompt], 30, seed=5 + i, temperature=3.0).tokens == [together[i]]


def test_logprobs_are_those_of_the_softmax():
    found = made([[0]], 1, temperature=0)
    expected = liked(torch.tensor([0]))[:, :VOCAB].log_softmax(-1)[0, 1]
    assert found.logprobs[0][0] == pytest.approx(float(expected), abs=1e-6)
    hot = made([[0]], 1, temperature=2.0, top_k=3, seed=1)
    assert hot.logprobs[0][0] == pytest.approx(
        float((liked(torch.tensor([0]))[:, :VOCAB] / 2).log_softmax(-1)[0, hot.tokens[0][0]]), abs=1e-6
    )


def frequencies(count: int = 4000, **settings) -> torch.Tensor:
    logits = liked(torch.zeros(count, dtype=torch.int64))[:, :VOCAB]
    uniforms = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.bincount(draw(logits, Sampling(**settings), uniforms)[0], minlength=VOCAB) / count


def test_frequencies_are_those_of_the_softmax():
    shares = frequencies(temperature=2.0)
    torch.testing.assert_close(shares, (liked(torch.tensor([0]))[0, :VOCAB] / 2).softmax(-1), atol=0.03, rtol=0)
    assert (shares > 0).all()
    two = frequencies(temperature=2.0, top_k=2)
    assert two[1] == pytest.approx(torch.sigmoid(torch.tensor(0.5)).item(), abs=0.03)
    assert two[1] + two[2] == 1


def test_top_p_keeps_the_likeliest_that_have_the_share():
    # Their shares at temperature 1 are 0.731 and 0.269, less 1e-3 for the other eight.
    assert frequencies(top_p=0.5)[1] == 1
    both = frequencies(top_p=0.9)
    assert both[1] + both[2] == 1
    assert both[1] == pytest.approx(0.731, abs=0.03)
    assert frequencies(top_p=1e-9)[1] == 1


@pytest.mark.promise("Tools", "`generate` samples at every temperature above 0.")
@pytest.mark.parametrize("temperature", [1e-45, 1e-320, 1e-10, 1e300])
def test_every_temperature_above_zero_draws(temperature):
    drawn = made([[3]], 3, temperature=temperature).tokens[0]
    assert drawn == [4, 5, 6] or temperature > 1


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_range_draw_a_token_that_can_be(uniform):
    logits = torch.tensor([[0.0, -1e30, 1.0]])
    token = int(draw(logits, Sampling(), torch.tensor([uniform], dtype=torch.float64))[0])
    assert token == (2 if uniform == 0 else 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, "temperature -0.5 must be finite and 0 or more"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_k": -2}, "top-k -2 must be 0 or more"),
        ({"top_p": 0.0}, "top-p 0.0 must be greater than 0"),
        ({"top_p": 1.5}, "top-p 1.5"),
        ({"top_p": float("nan")}, "top-p nan"),
        ({"seed": 2**63}, "seed 9223372036854775808 must be"),
        ({"temperature": 0, "top_k": 5}, "temperature 0 is greedy decoding, so top-k 5 .* no effect"),
        ({"temperature": 0, "top_p": 0.5}, "top-p 0.5 have no effect"),
    ],
)
def test_bad_sampling_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("prompts", "n", "message"),
    [
        ([], 1, "there is no prompt"),
        ([[1], []], 1, "or an empty one: give at least one token"),
        ([[1]], -1, "tokens -1 must be between 0 and 10000"),
        ([[1]], 10**7, "tokens 10000000 .* and 10000; for a longer text"),
        ([[1], [1] * 9], 1, "prompt 2 of 2 has 9 tokens, but the model's context has 8: shorten it"),
    ],
)
def test_bad_requests_are_refused(prompts, n, message):
    with pytest.raises(ValueError, match=message):
        made(prompts, n)


def test_a_model_that_diverged_is_told():
    class Diverged(Counting):
        def prefill(self, sequences):
            return torch.full((1, PADDED), torch.nan)

    with pytest.raises(ValueError, match="logits are NaN or infinite: it has diverged"):
        made([[1]], 1, Diverged())


def test_sampling_is_copied_and_pickled_and_speed_is_told():
    sampling = Sampling(temperature=0.5, top_k=3)
    assert copy.deepcopy(sampling) == pickle.loads(pickle.dumps(sampling)) == sampling
    assert made([[1], [2]], 3).speed.startswith("2 tokens of 2 prompts in ")
    assert "6 tokens generated" in made([[1], [2]], 3).speed
