"""Lines of progress: their numbers, their interval, and a document that takes long."""

import time

import pytest

from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing import indexing
from megatron.lm.data.preprocessing.indexing import Document, EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.progress import Progress

OPTIONS = EncodeOptions(data=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=100)


def test_progress_counts_and_keeps_its_interval(capsys):
    progress = Progress(total_bytes=1000, interval=10)
    for _ in range(4):
        progress.advance(5, 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("10 documents (20 %)")
    assert all(word in lines[1] for word in ("20 documents (40 %)", "documents/s", "MB/s", "s left"))


@pytest.mark.promise("Data", "A document that takes minutes shows progress.")
def test_one_long_document_shows_progress(tmp_path, capsys, monkeypatch):
    """It takes half a second here, and a line is due every 0.05 s."""

    class Slow:
        vocab_size, eod = 100, 99

        def tokenize(self, text):
            time.sleep(0.5)
            return [1, 2]

    monkeypatch.setattr(indexing, "build_tokenizer", lambda *_: Slow())
    progress = Progress(total_bytes=3_000_000, interval=1000, seconds=0.05)
    long = Document(texts={"text": "1 2"}, source_bytes=2_000_000)
    write_datasets([long], {"text": tmp_path / "p"}, OPTIONS, workers=0, progress=progress)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert lines[0].startswith("0 documents (0 %), 0 documents/s, 0.00 MB/s, 2.0 MB at work, after")
    assert not progress._thread.is_alive()
