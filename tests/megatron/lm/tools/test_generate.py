"""Sampling against a model whose answers are known, and the way from checkpoint to text with the trainer's side replaced."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.lm.tools import generate

VOCAB, PADDED = 10, 16


def counting(tokens, positions, mask):
    """Likes the successor of each token best, then the one after it; loves the padding."""
    assert mask is None
    assert positions.tolist() == [list(range(tokens.shape[1]))] * tokens.shape[0]
    logits = torch.zeros(*tokens.shape, PADDED)
    logits[..., VOCAB:] = 100.0
    logits.scatter_(-1, ((tokens + 1) % VOCAB).unsqueeze(-1), 9.0)
    return logits.scatter_(-1, ((tokens + 2) % VOCAB).unsqueeze(-1), 8.0)


def draw(start, n, seed=0, model=counting, **more):
    settings = {"seq_length": 4, "vocab_size": VOCAB, "temperature": 1.0, "top_k": 0} | more
    return generate.sample(model, torch.tensor(start), n, generator=torch.Generator().manual_seed(seed), **settings).tolist()


def test_greedy_follows_the_model_for_each_row():
    assert draw([[1], [7]], 4, temperature=0.0) == [[1, 2, 3, 4, 5], [7, 8, 9, 0, 1]]
    assert draw([[3]], 3, top_k=1) == [[3, 4, 5, 6]]
    assert draw([[3]], 0) == [[3]]


def test_context_is_cropped_to_the_sequence_length():
    seen = []

    def spy(tokens, positions, mask):
        seen.append(tokens.tolist())
        return counting(tokens, positions, mask)

    draw([[1, 2, 3]], 3, model=spy, temperature=0.0)
    assert seen == [[[1, 2, 3]], [[1, 2, 3, 4]], [[2, 3, 4, 5]]]


def test_frequencies_are_those_of_the_softmax():
    tokens = torch.tensor([[0]] * 4000)
    settings = {"seq_length": 4, "vocab_size": VOCAB, "temperature": 2.0, "generator": torch.Generator().manual_seed(1)}
    drawn = generate.sample(counting, tokens, 1, top_k=2, **settings)[:, 1]
    assert set(drawn.tolist()) == {1, 2}
    assert (drawn == 1).float().mean() == pytest.approx(torch.sigmoid(torch.tensor(0.5)).item(), abs=0.03)
    everything = generate.sample(counting, tokens, 1, top_k=0, **settings)[:, 1]
    assert set(everything.tolist()) == set(range(VOCAB))


@pytest.mark.parametrize("temperature", [1e-45, 1e-320, 1e-10, 1e300])
def test_every_temperature_above_zero_draws(temperature):
    drawn = draw([[3]], 3, temperature=temperature)[0]
    assert drawn == [3, 4, 5, 6] or temperature > 1


def test_seed_decides():
    assert draw([[1]], 30, seed=3) == draw([[1]], 30, seed=3)
    assert draw([[1]], 30, seed=3) != draw([[1]], 30, seed=4)


@pytest.mark.parametrize(
    ("start", "n", "more", "message"),
    [
        (torch.zeros(1, 0), 1, {}, r"shape \[1, 0\].*give a prompt"),
        ([1, 2], 1, {}, r"shape \[2\]"),
        ([[1]], -1, {}, "tokens -1"),
        ([[1]], 1, {"temperature": -0.5}, "temperature -0.5"),
        ([[1]], 1, {"temperature": float("nan")}, "temperature nan"),
        ([[1]], 1, {"temperature": float("inf")}, "temperature inf"),
        ([[1]], 10**7, {}, "tokens 10000000, .* at most 1000000"),
        ([[1]], 1, {"top_k": -2}, "top-k -2"),
        ([[1]], 1, {"model": lambda *_: torch.full((1, 1, PADDED), torch.nan)}, "logits are NaN or infinite: it has diverged"),
    ],
)
def test_bad_settings_are_refused(start, n, more, message):
    start = start.tolist() if isinstance(start, torch.Tensor) else start
    with pytest.raises(ValueError, match=message):
        draw(start, n, **more)


class Digits:
    vocab_size, eod = VOCAB, 9

    def tokenize(self, text):
        return [int(c) for c in text]

    def detokenize(self, ids):
        return "".join(map(str, ids))


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, positions, mask):
        return counting(tokens, positions, mask)


@pytest.fixture
def trainer(monkeypatch):
    """The trainer's side: one checkpoint called `here`, and a record of the process groups being left."""
    left = []

    def load_for_inference(path):
        if path != Path("here"):
            raise ValueError(f"--load {path} does not exist")
        return Counting(), SimpleNamespace(model=SimpleNamespace(seq_length=4)), Digits()

    checkpoint, groups = ModuleType("megatron.lm.checkpoint"), ModuleType("megatron.lm.process_groups")
    checkpoint.load_for_inference, groups.shutdown = load_for_inference, lambda: left.append(True)
    monkeypatch.setitem(sys.modules, "megatron.lm.checkpoint", checkpoint)
    monkeypatch.setitem(sys.modules, "megatron.lm.process_groups", groups)
    return left


def test_text_ends_with_the_document(trainer, capsys):
    assert generate.main(["--load", "here", "--prompt", "45", "--tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "45678\n"
    assert generate.main(["--load", "here", "--prompt", "45", "--tokens", "20", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "45678\n"
    assert trainer == [True, True]


def test_without_a_prompt_a_document_begins(trainer, capsys):
    assert generate.main(["--load", "here", "--tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "012\n"


def test_missing_checkpoint_is_told(trainer, capsys):
    assert generate.main(["--load", "nowhere"]) == 2
    assert "--load nowhere does not exist" in capsys.readouterr().err
    assert trainer == [True]


@pytest.mark.parametrize(
    ("changed", "message"), [({"seed": 2**64}, "--seed 18446744073709551616 must lie"), ({"prompt": "a\udcff"}, "no UTF-8")]
)
def test_what_could_not_be_drawn_from_is_refused_first(trainer, changed, message):
    with pytest.raises(ValueError, match=message):
        generate.generate(Path("here"), **{"prompt": "", "n": 1, "temperature": 1.0, "top_k": 0, "seed": 0, **changed})
    assert trainer == []
