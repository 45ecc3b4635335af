"""Functions for the task files in this folder: read a local JSON-lines file, and process questions with lettered options.

lm-eval loads this file by its path.
"""

import json
import re
from pathlib import Path
from typing import Any

_LETTER = r"[A-E]\. ?"


def load(file: str, data_dir: str = ".", **_: Any) -> dict[str, Any]:
    """Return the lines of `data_dir/file` as the split `test`, for a task's `custom_dataset`.

    Raises:
        ValueError: if the file is missing, invalid JSON, or empty.
    """
    import datasets

    path = Path(data_dir) / file
    if not path.is_file():
        raise ValueError(f"{path} does not exist: set --data-dir to the folder with {file} (docs/guide/evaluation.md has its source)")
    try:
        documents = [json.loads(line) for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} is invalid JSON ({error}): expected one object per line") from None
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise ValueError(f"{path} is empty, or one of its lines is not a JSON object: expected one object per line")
    return {"test": datasets.Dataset.from_list(documents)}


def lettered(dataset: Any) -> Any:
    """`process_docs` of tasks with all options in one text, "A. this\\nB. that": add `choices` and `gold`, drop rows without an answer."""
    rows = [_parsed(row) for row in dataset]
    kept = [row for row in rows if row is not None]
    if not kept:
        raise ValueError("no row has its answer among lettered options: this may be a test set without answers")
    return type(dataset).from_list(kept)


def _parsed(row: dict[str, Any]) -> dict[str, Any] | None:
    choices = [part.strip() for part in re.split(rf"(?:^|\n)\s*{_LETTER}", row["options"])[1:]]
    answer = re.sub(rf"^{_LETTER}", "", str(row.get("answer") or "")).strip()
    if answer not in choices:
        return None
    question = row["question"].strip()
    return {"question": question, "passage": row.get("passage") or "", "choices": choices, "gold": choices.index(answer)}


def yes_or_no(dataset: Any) -> Any:
    """`process_docs` of BoolQ: `gold` is 0 for no, 1 for yes; its answers are "True" and "False"."""
    return type(dataset).from_list(
        [
            {"passage": row["passage"], "question": row["question"], "gold": int(str(row["answer"]).lower() == "true")}
            for row in dataset
            if str(row.get("answer")).lower() in ("true", "false")
        ]
    )
