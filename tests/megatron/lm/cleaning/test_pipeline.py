"""Documents through the rules, on several workers, killed and taken up again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import hosts, texts
from megatron.lm.cleaning import pipeline
from megatron.lm.cleaning.pipeline import Rules, clean, examine

ROOT = Path(__file__).resolve().parents[4]


def corpus(folder: Path, count: int = 40) -> Path:
    """Documents of which some are the same, empty, or poor."""
    rows = [{"text": f"  {texts.SPEECH} Number {i % 30}.\n", "id": i} for i in range(count)]
    rows[3]["text"], rows[5]["text"] = " \n", "\ud800"
    rows[7]["text"] = "too short"
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "in.jsonl"


def test_what_is_left_and_why_the_rest_went(tmp_path: Path):
    counts = clean([corpus(tmp_path)], tmp_path / "out.jsonl", Rules(quality=True), workers=0)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [i for i in range(40) if i not in (3, 5, 7) and (i < 30 or i in (33, 35, 37))]
    assert rows[0] == {"text": f"{texts.SPEECH} Number 0.", "id": 0}
    reasons = {"empty": 1, "half of a surrogate pair": 1, "quality: too few words": 1, "duplicate: exact": 7}
    assert counts == {"read": 40, "kept": 30, "bytes kept": sum(len(row["text"].encode()) for row in rows), **reasons}
    assert json.loads((tmp_path / "out.jsonl.counts.json").read_text()) == counts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.counts.json"]


def test_neither_workers_nor_parts_change_a_byte(tmp_path: Path):
    source, found = corpus(tmp_path), []
    for workers, part_bytes in ((0, 1 << 20), (0, 1), (2, 3000)):
        clean([source], tmp_path / "out.jsonl", Rules(quality=True), workers=workers, part_bytes=part_bytes)
        found.append((tmp_path / "out.jsonl").read_bytes())
        (tmp_path / "out.jsonl").unlink()
    assert found[0] == found[1] == found[2]


def test_parts_that_are_there_are_not_made_again(tmp_path: Path, monkeypatch):
    source, looked = corpus(tmp_path), []

    def stop_after(count: int):
        def spied(row, rules):
            if len(looked) == count:
                raise KeyboardInterrupt
            looked.append(row["id"])
            return examine(row, rules)

        return spied

    monkeypatch.setattr(pipeline, "examine", stop_after(25))
    with pytest.raises(KeyboardInterrupt):
        clean([source], tmp_path / "out.jsonl", Rules(), workers=0, part_bytes=5000)
    assert not (tmp_path / "out.jsonl").exists()
    monkeypatch.setattr(pipeline, "examine", stop_after(1000))
    clean([source], tmp_path / "out.jsonl", Rules(), workers=0, part_bytes=5000)
    assert set(looked) == set(range(40))
    assert len(looked) < 25 + 40
    again = tmp_path / "again.jsonl"
    clean([source], again, Rules(), workers=0)
    assert again.read_bytes() == (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.nightly(20)
def test_a_killed_run_goes_on_and_ends_the_same(tmp_path: Path):
    source = corpus(tmp_path, 4000)
    command = [sys.executable, "-m", "megatron.lm.tools.clean_data", "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    command += ["--quality", "--workers", "2", "--part-bytes", "50000"]
    killed = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    parts = tmp_path / "out.jsonl.parts"
    while len(list(parts.glob("*.jsonl"))) < 3 and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "out.jsonl").exists()
    assert parts.is_dir()
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    clean([source], tmp_path / "whole.jsonl", Rules(quality=True), workers=0)
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert not parts.exists()


def test_parts_of_another_run_are_refused(tmp_path: Path):
    source = corpus(tmp_path)
    pipeline._begin(tmp_path / "out.jsonl.parts", {"other": True})
    with pytest.raises(ValueError, match=r"out.jsonl.parts is from a run with other input or rules: delete it"):
        clean([source], tmp_path / "out.jsonl", Rules(), workers=0)


def test_near_duplicates_and_languages(tmp_path: Path):
    hosts.need("datasketch", "data")
    hosts.need("py3langid", "data")
    german = "Dies ist ein Satz in deutscher Sprache, der nicht bleiben soll. " * 5
    rows = [texts.SPEECH, texts.SPEECH + " Indeed.", german, "Something quite different is written here, in English all the same."]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    counts = clean([tmp_path / "in.jsonl"], tmp_path / "out.jsonl", Rules(languages=("en",), near=0.8), workers=0)
    assert {name: count for name, count in counts.items() if name != "bytes kept"} == {
        "read": 4,
        "kept": 2,
        "language": 1,
        "duplicate: near": 1,
    }


def test_code_is_cleaned(tmp_path: Path):
    body = "import os\n\n\ndef name(path):\n    if path:\n        return os.path.basename(path)\n    return None"
    rows = [{"content": "# Copyright 2020 A\n" + body}, {"content": "x = 1"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    clean([tmp_path / "in.jsonl"], tmp_path / "out.jsonl", Rules(key="content", code=True), workers=0)
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {"content": body}


def test_nothing_left_is_an_empty_file(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"text": " "}\n')
    assert clean([tmp_path / "in.jsonl"], tmp_path / "out.jsonl", Rules(), workers=0)["kept"] == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"code": True, "quality": True}, "rules for code and for text"),
        ({"code": True, "languages": ("en",)}, "rules for code and for text"),
        ({"exact": False}, "no rule is selected"),
    ],
)
def test_rules_that_contradict_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Rules(**settings)


def test_rules_of_libraries_are_judged_or_the_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ValueError, match=r"datasketch is missing .*pip install -e '\.\[data\]'"):
        Rules(near=0.8)
    hosts.need("py3langid", "data")
    with pytest.raises(ValueError, match="language klingon is unknown: give ISO 639-1 codes"):
        Rules(languages=("en", "klingon"))


@pytest.mark.parametrize(("row", "message"), [({"body": "x"}, "'text' is missing, .* fields are 'body'"), ({"text": 3}, "holds int")])
def test_a_document_without_text_is_refused(row: dict, message: str):
    with pytest.raises(ValueError, match=message):
        examine(row, Rules())
