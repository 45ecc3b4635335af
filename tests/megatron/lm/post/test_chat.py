"""Which tokens of a conversation are answers: those between the generation prompt and the end of the turn, its mark included."""

import pytest

from helpers import post_runs
from megatron.lm.post import chat

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


def test_marks_of_the_template_say_the_same(tokenizer):
    plain = chat.encode(tokenizer, TALK, "row 1")
    tokenizer.chat_template = MARKED
    assert chat.encode(tokenizer, TALK, "row 1") == plain


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
