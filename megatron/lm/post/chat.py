"""Tokenize a conversation with the tokenizer's chat template, and mark the tokens of answers.

A template with `{% generation %}` marks its answers itself. With other templates, the answer of a turn is the text that the template
renders after the previous conversation with the generation prompt, without trailing white space: the content and the end-of-turn marker.
The whole conversation is tokenized once, as at generation; a token belongs to an answer if its first character does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.post.conversations import Message
from megatron.lm.shell.files import read_input


class Example(NamedTuple):
    """Tokens of a conversation, and for each whether it is part of an answer."""

    tokens: list[int]
    answer: list[bool]


def use_template(tokenizer: Any, file: Path | None) -> None:
    """Check that a tokenizer has a chat template, or set it from `file`, a Jinja text.

    Raises:
        ValueError: if there is none.
    """
    if file is not None:
        tokenizer.chat_template = read_input(file, "a chat template, a Jinja text")
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template: give --chat-template FILE, a Jinja text, or a chat model"
        )


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the tokens of a conversation up to the start of the assistant's answer."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(tokenizer: Any, messages: Sequence[Message], where: str) -> Example:
    """Return the tokens of a whole conversation, with its answers marked.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        messages: with at least one assistant turn.
        where: location of the conversation, for error messages.

    Raises:
        ValueError: if the template renders earlier turns differently when later ones follow, or no token belongs to an answer.
    """
    messages = list(messages)
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        example = Example(list(marked["input_ids"]), [bool(mark) for mark in marked["assistant_masks"]])
    else:
        text, spans = _spans(tokenizer, messages, where)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        inside = [any(start <= first < end for start, end in spans) for first, _ in encoded["offset_mapping"]]
        example = Example(list(encoded["input_ids"]), inside)
    if not any(example.answer[1:]):  # the first token of all is predicted from nothing
        raise ValueError(f"{where} has no token of an answer: give each conversation an answer that is not empty")
    return example


def encode_answer(tokenizer: Any, prompt: Sequence[Message], answer: str, where: str) -> Example:
    """Return the tokens of a conversation with only the last answer marked; arguments and errors as `encode`."""
    whole = encode(tokenizer, [*prompt, {"role": "assistant", "content": answer}], where)
    last = max(place for place, inside in enumerate(whole.answer) if inside)
    first = max((place for place in range(last) if not whole.answer[place]), default=-1) + 1
    return Example(whole.tokens, [first <= place <= last for place in range(len(whole.tokens))])


def _spans(tokenizer: Any, messages: list[Message], where: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered conversation, and the start and end of each answer in it."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
            if not after.startswith(before) or not text.startswith(after.rstrip()):
                raise ValueError(
                    f"the chat template renders turn {turn + 1} of {where} differently after its answer, so answers cannot be "
                    "identified: give --chat-template FILE with a template that marks them with {% generation %}"
                )
            spans.append((len(before), len(after.rstrip())))
    return text, spans
