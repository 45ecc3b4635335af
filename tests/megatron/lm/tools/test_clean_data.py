"""The command: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from helpers import texts
from megatron.lm.tools import clean_data


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [texts.SPEECH, texts.SPEECH.upper(), "short", texts.SPEECH + " More."]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    return tmp_path / "in.jsonl"


def run(capsys, *words: object) -> tuple[int, str, str]:
    try:
        code = clean_data.main([str(word) for word in words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


def test_counts_and_reasons_are_told(source: Path, tmp_path: Path, capsys):
    output = tmp_path / "out" / "clean.jsonl"
    code, out, _ = run(capsys, "--input", source, "--output", output, "--quality", "--workers", 0)
    assert code == 0
    size = 2 * len(texts.SPEECH.encode()) + len(" More.")
    reasons = "         1  duplicate: exact\n         1  quality: too few words\n"
    assert out == f"{output}: 2 of 4 documents, {size} bytes of text\n{reasons}"
    assert len(output.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "none.jsonl"], "none.jsonl does not exist: use .jsonl"),
        (["--near-duplicates", "1.5"], "1.5"),
        (["--no-exact"], "no rule is selected"),
        (["--code", "--quality"], "rules for code and for text"),
        (["--json-key", "body"], "'body' is missing, but must be text; its fields are 'text'"),
        (["--output", "{source}"], "in.jsonl exists: nothing is overwritten"),
        (["--workers", "-1"], "-1 is out of range"),
    ],
)
def test_bad_input_is_one_line(source: Path, tmp_path: Path, capsys, words: list[str], message: str):
    words = [word.format(source=source) for word in words]
    for flag, value in (("--input", source), ("--output", tmp_path / "out.jsonl"), ("--workers", 0)):
        words += [] if flag in words else [flag, str(value)]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err or ("datasketch is missing" in err and message == "1.5")
    assert not (tmp_path / "out.jsonl").exists()
