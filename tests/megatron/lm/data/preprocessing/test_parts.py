"""Parts against the whole: the same bytes, whatever was killed in between."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing import parts
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.data.preprocessing.parts import write_in_parts
from megatron.lm.shell.progress import Progress
from megatron.lm.tools import preprocess_data

ROOT = Path(__file__).resolve().parents[5]
OPTIONS = EncodeOptions(data=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=50)
SUFFIXES = (".bin", ".idx", ".json")


def documents(count: int = 30) -> list[Document]:
    texts = [" ".join(str((i * j) % 49) for j in range(1, i % 7 + 1)) for i in range(count)]
    return [Document(texts={"text": text, "title": "1" if i < 3 else ""}, source_bytes=10) for i, text in enumerate(texts)]


def contents(prefix: Path) -> list[bytes]:
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in SUFFIXES]


def prefixes(folder: Path) -> dict[str, Path]:
    return {key: folder / key for key in ("text", "title")}


@pytest.mark.parametrize("part_bytes", [1, pytest.param(35, marks=pytest.mark.nightly), 10_000])
def test_parts_make_the_dataset_that_is_made_at_once(tmp_path: Path, part_bytes: int):
    whole, joined = prefixes(tmp_path / "whole"), prefixes(tmp_path / "joined")
    expected = write_datasets(documents(), whole, OPTIONS, workers=0)
    progress = Progress("tokenizing")
    progress.begin("tokenizing", 300, "bytes")
    found = write_in_parts(documents(), joined, OPTIONS, source={}, workers=0, part_bytes=part_bytes, progress=progress)
    assert found == expected
    assert progress.done == 300
    for key in whole:
        assert contents(joined[key]) == contents(whole[key])
    assert sorted(path.name for path in (tmp_path / "joined").iterdir()) == sorted(key + suffix for key in whole for suffix in SUFFIXES)


def test_parts_that_are_there_are_taken(tmp_path: Path):
    whole, joined = prefixes(tmp_path / "whole"), prefixes(tmp_path / "joined")
    write_datasets(documents(), whole, OPTIONS, workers=0)

    def cut_short():
        yield from documents()[:14]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_in_parts(cut_short(), joined, OPTIONS, source={}, workers=0, part_bytes=50)
    assert not joined["text"].with_name("text.idx").exists()
    said: list[str] = []
    write_in_parts(documents(), joined, OPTIONS, source={}, workers=0, part_bytes=50, say=said.append)
    assert said == ["part 0 is already finished", "part 1 is already finished"]
    assert contents(joined["text"]) == contents(whole["text"])


def test_parts_of_other_input_or_another_tokenizer_are_refused(tmp_path: Path):
    def cut_short():
        yield from documents()[:14]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_in_parts(cut_short(), prefixes(tmp_path), OPTIONS, source={"a": 1}, workers=0, part_bytes=50)
    other = EncodeOptions(data=OPTIONS.data, vocab_size=51)
    for options, source in ((OPTIONS, {"a": 2}), (other, {"a": 1})):
        with pytest.raises(ValueError, match=r"text.parts is left over from a run on other input or with other settings: delete it"):
            write_in_parts(documents(), prefixes(tmp_path), options, source=source, workers=0, part_bytes=50)


def test_bad_input_leaves_nothing_and_a_full_disk_leaves_the_parts(tmp_path: Path, monkeypatch):
    bad = [*documents(10), Document(texts={"text": "x", "title": ""}, source_bytes=1)]
    with pytest.raises(ValueError, match="whitespace-separated integers"):
        write_in_parts(bad, prefixes(tmp_path / "a"), OPTIONS, source={}, workers=0, part_bytes=50)
    assert list((tmp_path / "a").iterdir()) == []

    def full(self, prefix, counts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts.Writer, "join", full)
    with pytest.raises(ValueError, match=r"No space left on device\): free disk space and rerun; the parts are kept"):
        write_in_parts(documents(), prefixes(tmp_path / "b"), OPTIONS, source={}, workers=0, part_bytes=50)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["text.parts"]


def test_no_text_under_a_key_is_refused(tmp_path: Path):
    rows = [Document(texts={"text": "1", "title": ""}, source_bytes=10)] * 8
    with pytest.raises(ValueError, match="the input has no text under key 'title'"):
        write_in_parts(rows, prefixes(tmp_path / "a"), OPTIONS, source={}, workers=0, part_bytes=20)
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.nightly(30)
def test_a_killed_command_goes_on(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": " ".join(["7"] * (i % 90 + 1))}) + "\n" for i in range(20_000)))
    command = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "50", "--append-eod"]
    killed = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "megatron.lm.tools.preprocess_data",
            *command,
            "--output-prefix",
            str(tmp_path / "a"),
            "--part-bytes",
            "100000",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    folder = tmp_path / "a_text_document.parts"
    while len(list(folder.glob("?????.json"))) < 2 and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "a_text_document.idx").exists()
    for name, size in (("a", "100000"), ("b", "100000000")):
        assert preprocess_data.main([*command, "--workers", "2", "--output-prefix", str(tmp_path / name), "--part-bytes", size]) == 0
    assert contents(tmp_path / "a_text_document") == contents(tmp_path / "b_text_document")
    assert not folder.exists()
