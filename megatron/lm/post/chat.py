"""A conversation as tokens, by the tokenizer's own chat template, and which of them are answers.

A template with `{% generation %}` marks its answers itself. Of any other the answer of a turn is what the template renders for it beyond
the conversation before with the generation prompt, without the white space at its end: the text and the mark that ends the turn. The
whole is tokenised once, as generation will see it; a token is an answer's where its first character is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.post.conversations import Message
from megatron.lm.shell.files import read_text


class Example(NamedTuple):
    """Tokens of a conversation, and of each whether it is part of an answer."""

    tokens: list[int]
    answer: list[bool]


def use_template(tokenizer: Any, file: Path | None) -> None:
    """See that a tokenizer has a chat template; `file`, of Jinja text, takes the place of its own.

    Raises:
        ValueError: where there is none.
    """
    if file is not None:
        tokenizer.chat_template = read_text(file, "a chat template, a Jinja text")
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template: give --chat-template FILE, a Jinja text, or a chat model"
        )


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Tokens of a conversation up to where the assistant is to answer."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(tokenizer: Any, messages: Sequence[Message], where: str) -> Example:
    """Tokens of a whole conversation and its answers.

    Args:
        tokenizer: a fast one of transformers, with a chat template.
        messages: with at least one turn of the assistant.
        where: names the conversation in messages.

    Raises:
        ValueError: a template that renders earlier turns otherwise once later ones follow, or a conversation without an answer's token.
    """
    messages = list(messages)
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        found = Example(list(marked["input_ids"]), [bool(mark) for mark in marked["assistant_masks"]])
    else:
        text, spans = _spans(tokenizer, messages, where)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        inside = [any(start <= first < end for start, end in spans) for first, _ in encoded["offset_mapping"]]
        found = Example(list(encoded["input_ids"]), inside)
    if not any(found.answer[1:]):  # the first token of all is predicted from nothing
        raise ValueError(f"{where} has no token of an answer: give each conversation an answer that is not empty")
    return found


def encode_answer(tokenizer: Any, prompt: Sequence[Message], answer: str, where: str) -> Example:
    """Tokens of a conversation of which the last answer alone is marked; arguments and errors as `encode`."""
    whole = encode(tokenizer, [*prompt, {"role": "assistant", "content": answer}], where)
    last = max(place for place, inside in enumerate(whole.answer) if inside)
    first = max((place for place in range(last) if not whole.answer[place]), default=-1) + 1
    return Example(whole.tokens, [first <= place <= last for place in range(len(whole.tokens))])


def _spans(tokenizer: Any, messages: list[Message], where: str) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and where in it the answers begin and end."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
            if not after.startswith(before) or not text.startswith(after.rstrip()):
                raise ValueError(
                    f"the chat template renders turn {turn + 1} of {where} otherwise once it is answered, so that answers cannot be told "
                    "apart: give --chat-template FILE, one that marks them by {% generation %}"
                )
            spans.append((len(before), len(after.rstrip())))
    return text, spans
