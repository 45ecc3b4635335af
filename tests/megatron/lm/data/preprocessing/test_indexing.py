"""Writing indexed datasets: contents, counts, atomicity, workers."""

import errno
import io
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from helpers import dist
from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing import indexing
from megatron.lm.data.preprocessing.indexing import EncodeOptions, read_counts, write_datasets
from megatron.lm.data.preprocessing.inputs import Document

OPTIONS = EncodeOptions(data=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=100)


def documents(*texts, key="text"):
    return [Document(texts={key: text}, source_bytes=len(text)) for text in texts]


def contents(prefix):
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("workers", [0, 2])
def test_written_datasets_read_back_in_order(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(indexing, "_CHUNK_BYTES", 8)
    texts = [" ".join(str(i % 99) for _ in range(1 + i % 4)) for i in range(40)]
    counts = write_datasets(documents(*texts), {"text": tmp_path / "p"}, OPTIONS, workers=workers)["text"]
    assert contents(tmp_path / "p") == [[*map(int, text.split()), 99] for text in texts]
    assert counts.documents == 40
    assert counts.tokens == sum(len(text.split()) + 1 for text in texts)
    assert counts.text_bytes == sum(map(len, texts))
    assert json.loads((tmp_path / "p.json").read_text()) == {
        "documents": 40,
        "tokens": counts.tokens,
        "text_bytes": counts.text_bytes,
        "vocab_size": 100,
        "dtype": "uint16",
    }


def test_without_eod_and_without_empty_documents(tmp_path):
    options = EncodeOptions(data=OPTIONS.data, vocab_size=70000, append_eod=False)
    counts = write_datasets(documents("1 2", "  ", "69000"), {"text": tmp_path / "p"}, options, workers=0)["text"]
    assert contents(tmp_path / "p") == [[1, 2], [69000]]
    assert (counts.documents, counts.dtype, counts.text_bytes) == (2, "int32", 8)
    arabic = write_datasets(documents("1 \u0663"), {"text": tmp_path / "q"}, options, workers=0)["text"]
    assert arabic.text_bytes == 4, "bytes of UTF-8, not characters"


def test_each_key_makes_a_dataset(tmp_path):
    both = [Document(texts={"question": "1", "answer": "2 3"}, source_bytes=4)]
    write_datasets(both, {"question": tmp_path / "q", "answer": tmp_path / "a"}, OPTIONS, workers=0)
    assert contents(tmp_path / "q") == [[1, 99]]
    assert contents(tmp_path / "a") == [[2, 3, 99]]


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_text_leaves_the_old_dataset_and_no_other_file(tmp_path, workers):
    write_datasets(documents("1 2 3"), {"text": tmp_path / "p"}, OPTIONS, workers=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="whitespace-separated integers"):
        write_datasets(documents("4", "word"), {"text": tmp_path / "p"}, OPTIONS, workers=workers)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def killed_while_writing(prefix: Path) -> None:
    def documents() -> Iterator[Document]:
        for _ in range(3):
            yield Document(texts={"text": "1 2 3"}, source_bytes=1 << 20)
        os.kill(os.getpid(), signal.SIGKILL)

    write_datasets(documents(), {"text": prefix}, OPTIONS, workers=0)


def test_kill_leaves_no_dataset(tmp_path):
    with pytest.raises(RuntimeError, match=r"a process died without a Python exception; exit codes by rank: \{0: -9\}"):
        dist.run(killed_while_writing, 1, tmp_path / "p", init=False)
    assert not any((tmp_path / f"p{suffix}").exists() for suffix in (".bin", ".idx", ".json"))


def killed_while_renaming(prefix: Path, renamed: int) -> None:
    rename, done = os.replace, []

    def replace(source: Path, target: Path) -> None:
        if len(done) == renamed:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(rename(source, target))

    os.replace = replace
    write_datasets(documents("7 8 9"), {"text": prefix}, OPTIONS, workers=0)


@pytest.mark.promise("Data", "Killed preprocessing restarts by the same command, which reports what it cleared.")
@pytest.mark.parametrize(("renamed", "left"), [(None, [".bin"]), (1, [".idx", ".json"])], ids=str)
def test_the_same_command_after_a_kill_says_what_was_left_and_writes_the_dataset(tmp_path, capfd, renamed, left):
    """`renamed`: how many of the files had their own names when the kill came; None: it came between documents."""
    killed, arguments = (killed_while_writing, ()) if renamed is None else (killed_while_renaming, (renamed,))
    with pytest.raises(RuntimeError, match="exit codes by rank"):
        dist.run(killed, 1, tmp_path / "p", *arguments, init=False)
    names = [f"p{suffix}.partial" for suffix in left]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".partial") == names
    capfd.readouterr()
    write_datasets(documents("1 2", "3"), {"text": tmp_path / "p"}, OPTIONS, workers=0)
    assert capfd.readouterr().err.splitlines() == [f"deleted {tmp_path / name}, left over from an interrupted run" for name in names]
    assert contents(tmp_path / "p") == [[1, 2, 99], [3, 99]]
    assert {path.name for path in tmp_path.iterdir()} == {"p.bin", "p.idx", "p.json"}
    write_datasets(documents("4"), {"text": tmp_path / "p"}, OPTIONS, workers=0)
    assert capfd.readouterr().err == ""


@pytest.mark.promise("Data", "A second process that writes the same dataset is refused.")
def test_two_processes_do_not_write_one_dataset(tmp_path):
    """The second is refused, and takes nothing from the first."""

    def texts() -> Iterator[Document]:
        yield from documents("1 2")
        with pytest.raises(ValueError, match=r"p is being written by another process: wait for it to end, or choose another"):
            write_datasets(documents("7"), {"text": tmp_path / "p"}, OPTIONS, workers=0)
        yield from documents("3")

    write_datasets(texts(), {"text": tmp_path / "p"}, OPTIONS, workers=0)
    assert contents(tmp_path / "p") == [[1, 2, 99], [3, 99]]
    assert {path.name for path in tmp_path.iterdir()} == {"p.bin", "p.idx", "p.json"}


def test_a_worker_that_is_killed_is_one_line(tmp_path):
    def killing():
        yield Document(texts={"text": "1"}, source_bytes=1 << 20)
        while not (children := multiprocessing.active_children()):
            time.sleep(0.01)
        children[0].kill()
        yield Document(texts={"text": "1"}, source_bytes=1 << 20)

    with pytest.raises(ValueError, match=r"one of 1 worker processes was killed.*use fewer --workers"):
        write_datasets(killing(), {"text": tmp_path / "p"}, OPTIONS, workers=1)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="no text under key 'text'"):
        write_datasets(documents("", " "), {"text": tmp_path / "p"}, OPTIONS, workers=0)
    with pytest.raises(ValueError, match="whitespace-separated integers"):
        write_datasets(documents("1", "word"), {"text": tmp_path / "o" / "deep" / "p"}, OPTIONS, workers=0)
    with pytest.raises(ValueError, match="File name too long"):
        write_datasets(documents("1"), {"text": tmp_path / "o" / ("p" * 300)}, OPTIONS, workers=0)
    assert not any(tmp_path.iterdir())  # nor a folder


@pytest.mark.parametrize("fails", ["while it is written", "when it is closed"])
def test_a_full_disk_is_one_line_and_leaves_the_old_dataset(tmp_path, monkeypatch, fails):
    write_datasets(documents("1 2 3"), {"text": tmp_path / "p"}, OPTIONS, workers=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    class Full(io.FileIO):
        def write(self, content):
            if fails == "while it is written":
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

        def close(self):
            super().close()
            raise OSError(errno.ENOSPC, "No space left on device")

    def builder(path, dtype):
        made = IndexedDatasetBuilder(path, dtype)
        made.data_file.close()
        made.data_file = Full(path, "wb")
        return made

    monkeypatch.setattr("megatron.core.datasets.indexed_dataset.IndexedDatasetBuilder", builder)
    with pytest.raises(ValueError, match=r"p cannot be written \(.*No space left on device\): free disk space"):
        write_datasets(documents("4"), {"text": tmp_path / "p"}, OPTIONS, workers=0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_counts_are_read_back(tmp_path):
    counts = write_datasets(documents("1 98"), {"text": tmp_path / "p"}, OPTIONS, workers=0)["text"]
    assert read_counts(str(tmp_path / "p")) == counts
    assert read_counts(str(tmp_path / "q")) is None
