"""Instructions and preferences from JSON or JSON lines, as lists of messages (`{"role": ..., "content": ...}`).

| a row has | it is |
| --- | --- |
| `messages` | a conversation, as chat templates take it |
| `conversations` with `from` and `value` | the same in ShareGPT's words |
| `instruction`, `output`, perhaps `input` and `system` | one question and one answer (Alpaca) |
| any of these, or `prompt`, beside `chosen` and `rejected` | a preference: what is asked, and two answers |
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.shell.files import read_text

Message = dict[str, str]
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_FORMS = "messages, conversations, or instruction and output"


class Preference(NamedTuple):
    """What is asked, ending with the user's turn, and the preferred and the other answer to it."""

    prompt: list[Message]
    chosen: str
    rejected: str


def rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file: a JSON list of objects, or an object a line.

    Raises:
        ValueError: naming file and line where it is missing, empty, no JSON, or a row is no object.
    """
    text = read_text(file, "a file of conversations, JSON or JSON lines")
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is no JSON ({error}): give a JSON list of objects, or an object a line") from None
    else:
        found = list(_lines(file, text))
    if not found:
        raise ValueError(f"{file} holds no row: give a file with at least one conversation")
    for number, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} of {file} is no object: each row has {_FORMS}")
    return found


def _lines(file: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} of {file} is no JSON ({error.msg}): each line is one object") from None


def conversation(row: Mapping[str, Any], where: str) -> list[Message]:
    """The messages of a row, in order; the last is the assistant's.

    Args:
        row: of `rows`.
        where: names the row in messages.

    Raises:
        ValueError: a row of no known form, an unknown role, or no answer at the end.
    """
    messages = _messages(row, where)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{where} ends with the turn of {messages[-1]['role']!r}: the last turn must be the assistant's answer")
    return messages


def prompt(row: Mapping[str, Any], where: str) -> list[Message]:
    """What a row asks: its `prompt`, or its conversation without an answer at the end.

    Raises:
        ValueError: a row of no known form, or one that does not come to the user's turn.
    """
    if "prompt" in row:
        given = row["prompt"]
        found = [{"role": "user", "content": given}] if isinstance(given, str) else _turns(given, where)
    else:
        found = _messages({"output": "", **row}, where)
        if found[-1]["role"] == "assistant":
            found = found[:-1]
    if not found or found[-1]["role"] != "user":
        raise ValueError(f"the prompt of {where} must end with the user's turn")
    return found


def preference(row: Mapping[str, Any], where: str) -> Preference:
    """The question of a row and its two answers.

    Raises:
        ValueError: where one of the three is missing, or both answers are the same.
    """
    if "chosen" not in row or "rejected" not in row:
        raise ValueError(f"{where} has {sorted(row)}: a preference has chosen and rejected beside its prompt")
    chosen, rejected = (_answer(row[key], f"{key} of {where}") for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError(f"{where} has the same text in chosen and rejected: there is nothing to prefer, drop the row")
    return Preference(prompt(row, where), chosen, rejected)


def _answer(value: Any, where: str) -> str:
    """The text of an answer: a string, a message, or a list with it as the last message."""
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, dict):
        value = _turns([value], where)[0]["content"]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} is {value!r}: give the answer's text, or a message with content")
    return value


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    for key in ("messages", "conversations"):
        if key in row:
            found = _turns(row[key], where)
            break
    else:
        if not isinstance(row.get("instruction"), str) or not isinstance(row.get("output"), str):
            raise ValueError(f"{where} has {sorted(row)}: a row has {_FORMS}")
        asked = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text)
        found = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    system = row.get("system")
    if system and found[:1] and found[0]["role"] != "system":
        found = [{"role": "system", "content": system}, *found]
    if not found:
        raise ValueError(f"{where} has no turn: give at least a question and an answer")
    return found


def _turns(turns: Any, where: str) -> list[Message]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError(f"{where} has {turns!r} for its turns: give a list of messages")
    found = []
    for turn in turns:
        role, content = (
            (turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) if isinstance(turn, dict) else (turn, "")
        )
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(f"{where} has the turn {turn!r}: a turn has role (one of {', '.join(_ROLES)}) and content, a text")
        found.append({"role": _ROLES[role], "content": content})
    return found
