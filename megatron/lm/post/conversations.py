"""Read instructions and preferences from JSON or JSON lines as lists of messages (`{"role": ..., "content": ...}`).

| fields of a row | meaning |
| --- | --- |
| `messages` | a conversation in the form of chat templates |
| `conversations` with `from` and `value` | the same in ShareGPT's format |
| `instruction`, `output`, optionally `input` and `system` | one question and one answer (Alpaca) |
| any of these or `prompt`, with `chosen` and `rejected` | a preference: a prompt and two answers |
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.shell.files import json_lines, read_input

Message = dict[str, str]
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_FORMS = "messages, conversations, or instruction and output"


class Preference(NamedTuple):
    """A prompt that ends with a user turn, the preferred answer, and the rejected one."""

    prompt: list[Message]
    chosen: str
    rejected: str


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file: a JSON list of objects, or one object per line.

    Raises:
        ValueError: with file and line, if the file is missing, empty or invalid JSON, or a row is not an object.
    """
    what = f"JSON or JSON lines of objects with {_FORMS}"
    text = read_input(file, what)
    if text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is invalid JSON ({error}): give {what}") from None
        wrong = next((number for number, row in enumerate(records, 1) if not isinstance(row, dict)), None)
        if wrong is not None:
            raise ValueError(f"row {wrong} of {file} is not a JSON object: give {what}")
    else:
        records = [row for _, row in json_lines(file, what)]
    if not records:
        raise ValueError(f"{file} has no rows: give a file with at least one conversation")
    return records


def conversation(row: Mapping[str, Any], where: str) -> list[Message]:
    """Return the messages of a row of `rows`, in order; the last is the assistant's. `where` the row is, for error messages.

    Raises:
        ValueError: if the row has no supported format, an unknown role, or no answer at the end.
    """
    messages = _messages(row, where)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{where} ends with the turn of {messages[-1]['role']!r}: the last turn must be the assistant's answer")
    return messages


def _prompt(row: Mapping[str, Any], where: str) -> list[Message]:
    """Return the prompt of a row: its `prompt`, or its conversation without an answer at the end.

    Raises:
        ValueError: if the row has no supported format, or the prompt does not end with a user turn.
    """
    if "prompt" in row:
        given = row["prompt"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else _turns(given, where)
    else:
        messages = _messages({"output": "", **row}, where)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError(f"the prompt of {where} must end with the user's turn")
    return messages


def preference(row: Mapping[str, Any], where: str) -> Preference:
    """Return the prompt of a row and its two answers.

    Raises:
        ValueError: if one of the three is missing, or both answers are the same.
    """
    if "chosen" not in row or "rejected" not in row:
        raise ValueError(f"{where} has {sorted(row)}: a preference must have chosen, rejected and a prompt")
    chosen, rejected = (_answer(row[key], f"{key} of {where}") for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError(f"{where} has the same text in chosen and rejected: there is nothing to prefer, drop the row")
    return Preference(_prompt(row, where), chosen, rejected)


def _answer(value: Any, where: str) -> str:
    """Return the text of an answer: a string, a message, or the last message of a list."""
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, dict):
        value = _turns([value], where)[0]["content"]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} is {value!r}: expected the answer's text, or a message with content")
    return value


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    for key in ("messages", "conversations"):
        if key in row:
            messages = _turns(row[key], where)
            break
    else:
        if not isinstance(row.get("instruction"), str) or not isinstance(row.get("output"), str):
            raise ValueError(f"{where} has {sorted(row)}: a row has {_FORMS}")
        asked = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    system = row.get("system")
    if system and messages[:1] and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if not messages:
        raise ValueError(f"{where} has no turn: give at least a question and an answer")
    return messages


def _turns(turns: Any, where: str) -> list[Message]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError(f"{where} has {turns!r} as its turns: expected a list of messages")
    messages = []
    for turn in turns:
        role, content = (
            (turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) if isinstance(turn, dict) else (turn, "")
        )
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(f"{where} has the turn {turn!r}: a turn must have a role (one of {', '.join(_ROLES)}) and content, a text")
        messages.append({"role": _ROLES[role], "content": content})
    return messages
