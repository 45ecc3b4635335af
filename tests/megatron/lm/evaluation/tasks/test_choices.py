"""Documents of local files, and questions with lettered options."""

import json
from pathlib import Path

import pytest

from helpers import hosts
from megatron.lm.evaluation.tasks import choices


def row(options: str, answer: object, **more: object) -> dict:
    return {"question": " Why? ", "options": options, "answer": answer, **more}


@pytest.mark.parametrize(
    "options", ["A. to eat\nB. A. Smith\nC. 3. no", "\nA. to eat\nB. A. Smith\nC. 3. no", " A.to eat\n B.A. Smith\nC. 3. no "]
)
def test_options_are_taken_apart_at_their_letters(options: str):
    for gold, answer in enumerate(["A. to eat", "B. A. Smith", "C. 3. no"]):
        parsed = choices._parsed(row(options, answer, passage="Once."))
        assert parsed == {"question": "Why?", "passage": "Once.", "choices": ["to eat", "A. Smith", "3. no"], "gold": gold}


@pytest.mark.parametrize("answer", ["D. else", None, ""])
def test_a_row_without_its_answer_is_none(answer: object):
    assert choices._parsed(row("A. this\nB. that", answer)) is None


def test_datasets_are_made_of_rows():
    datasets = hosts.need("datasets", "eval")
    made = choices.lettered(datasets.Dataset.from_list([row("A. this\nB. that", "B. that"), row("A. this\nB. that", None)]))
    assert list(made) == [{"question": "Why?", "passage": "", "choices": ["this", "that"], "gold": 1}]
    with pytest.raises(ValueError, match="no row has its answer"):
        choices.lettered(datasets.Dataset.from_list([row("A. this", "hidden")]))


class Rows(list):
    """A dataset, without the package."""

    from_list = classmethod(lambda cls, rows: cls(rows))


def test_an_answer_of_boolq_is_its_task_s_word_for_it():
    task = Path(choices.__file__).with_name("boolq.yaml").read_text(encoding="utf-8")
    words = json.loads(task.partition("doc_to_choice:")[2].partition("\n")[0])
    rows = Rows({"passage": "p", "question": "q", "answer": answer} for answer in ("True", "False", True, None))
    assert [words[row["gold"]] for row in choices.yes_or_no(rows)] == ["yes", "no", "yes"]


def test_lines_become_the_test_split(tmp_path: Path):
    hosts.need("datasets", "eval")
    (tmp_path / "set.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert choices.load("set.jsonl", data_dir=str(tmp_path), version=1.0)["test"]["a"] == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"set.jsonl does not exist: set --data-dir to the folder with set.jsonl"),
        ("", "set.jsonl is empty"),
        ('{"a": 1}\n{', "set.jsonl is invalid JSON"),
        ("3\n", "set.jsonl .*is not a JSON object"),
    ],
)
def test_files_that_are_no_documents_are_refused(tmp_path: Path, content: str | None, message: str):
    hosts.need("datasets", "eval")
    if content is not None:
        (tmp_path / "set.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        choices.load("set.jsonl", str(tmp_path))
