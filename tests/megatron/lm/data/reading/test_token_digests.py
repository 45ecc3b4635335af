"""The digest of all training tokens: read once, kept by inode, size and times, and compared between ranks."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

from helpers import dist, tiny
from megatron.lm.config.sections.training import DEFAULT_SPLIT
from megatron.lm.data.reading import order, token_digests
from megatron.lm.data.reading.token_digests import NOTE, Hashing, TokenDigests


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset that counts as old at once."""
    monkeypatch.setattr(token_digests, "_RECENT", -1.0)
    return tiny.write_data(tmp_path / "data")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def digests_of(monkeypatch: pytest.MonkeyPatch, *prefixes: Path) -> TokenDigests:
    """Of datasets whose index cache is the folder `cache` next to the first."""
    monkeypatch.setattr(
        token_digests, "sources", lambda train: [(str(prefix), prefixes[0].parent / "index_cache" / "x") for prefix in prefixes]
    )
    return TokenDigests(None)


def read(digests: TokenDigests) -> TokenDigests:
    while digests.exchange():
        digests.wait(1)
    return digests


def sha(prefix: Path) -> str:
    return hashlib.sha256(Path(f"{prefix}.bin").read_bytes()).hexdigest()


def note(prefix: Path) -> Path:
    return prefix.parent / "index_cache" / "x" / NOTE


def test_all_tokens_are_read_once(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    other = tiny.write_data(corpus.parent, "other")
    os.truncate(f"{other}.bin", 100)
    found = read(digests_of(monkeypatch, corpus, other))
    assert found.settled
    assert [found.digest(str(prefix)) for prefix in (corpus, other)] == [sha(corpus), sha(other)]
    assert found.digest("no dataset") is None
    with monkeypatch.context() as no_reads:
        no_reads.setattr(Hashing, "_digest", lambda self, stream: pytest.fail("it was read again"))
        again = digests_of(no_reads, corpus, other)
        assert again.settled
        assert again.exchange() == 0
        assert again.digest(str(corpus)) == sha(corpus)
    os.utime(f"{corpus}.bin")  # another time: another file
    again = digests_of(monkeypatch, corpus, other)
    assert not again.settled
    assert read(again).digest(str(corpus)) == sha(corpus)
    assert len(json.loads(note(corpus).read_text())) == 3


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another change within the clock's resolution would have the same times."""
    corpus = tiny.write_data(tmp_path)
    assert read(digests_of(monkeypatch, corpus)).digest(str(corpus)) == sha(corpus)
    assert not note(corpus).exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}x", '{"1-2-3": "%s"}' % ("a" * 64), '{"1-2-3-4": "b"}', '{"1-2-3-4": 5}', '{"../x": "a"}']
)
def test_a_note_from_elsewhere_is_judged(corpus: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    note(corpus).parent.mkdir(parents=True)
    note(corpus).write_text(content)
    assert read(digests_of(monkeypatch, corpus)).digest(str(corpus)) == sha(corpus)
    assert f"{note(corpus)} is invalid (" in capsys.readouterr().out
    assert list(json.loads(note(corpus).read_text()).values()) == [sha(corpus)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder is a link", "folder is a file"])
def test_a_note_that_leads_elsewhere_changes_nothing_there(corpus: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    precious, place = corpus.parent / "precious", note(corpus)
    precious.write_text("precious")
    if "folder" in kind:
        place.parent.parent.mkdir()
        (corpus.parent / "elsewhere").mkdir()
        place.parent.symlink_to(corpus.parent / "elsewhere") if "link" in kind else place.parent.write_text("")
    else:
        place.parent.mkdir(parents=True)
        {"link": os.symlink, "hard link": os.link, "pipe": lambda _, to: os.mkfifo(to)}[kind](precious, place)
    assert read(digests_of(monkeypatch, corpus)).digest(str(corpus)) == sha(corpus)
    assert precious.read_text() == "precious"
    if "folder" in kind:
        assert not (corpus.parent / "elsewhere" / NOTE).exists()


def test_a_file_that_changes_while_it_is_read(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    whole, times = Hashing._digest, [1]

    def changing(self: Hashing, stream: Any) -> str | None:
        found = whole(self, stream)
        if times[0]:
            times[0] -= 1
            with open(f"{corpus}.bin", "r+b") as file:
                file.write(bytes([times[0], 1]))
            os.utime(f"{corpus}.bin", ns=(0, 10**18 + times[0]))
        return found

    monkeypatch.setattr(Hashing, "_digest", changing)
    assert read(digests_of(monkeypatch, corpus)).digest(str(corpus)) == sha(corpus)
    times[0] = 10
    os.utime(f"{corpus}.bin")
    with pytest.raises(ValueError, match=r"corpus\.bin cannot be hashed \(it changes while it is read\); restore it, and resume"):
        read(digests_of(monkeypatch, corpus))


def test_a_file_that_is_gone(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    whole = Hashing._run
    monkeypatch.setattr(Hashing, "_run", lambda self: (os.unlink(f"{corpus}.bin"), whole(self)))
    with pytest.raises(ValueError, match=r"corpus\.bin cannot be hashed \(No such file or directory\)"):
        read(digests_of(monkeypatch, corpus))
    with pytest.raises(ValueError, match=r"corpus\.bin cannot be read \(No such file or directory\)"):
        digests_of(monkeypatch, corpus)


def test_reading_stops_when_it_is_closed(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_digests, "_CHUNK", 2)
    found = digests_of(monkeypatch, corpus)
    found.close()
    assert not found._hashing.thread.is_alive()
    assert not note(corpus).exists() or found._hashing.digests


def of_ranks(prefixes: list[Path], folder: Path) -> tuple[str, list[int]]:
    """What a rank says of its own copy, and which files it reads itself."""
    mine = prefixes[torch.distributed.get_rank()]
    token_digests.sources = lambda train: [(str(mine), folder)]  # type: ignore[assignment]
    try:
        digests = TokenDigests(None)
        return str(read(digests).digest(str(mine))), list(digests._hashing.digests)
    except ValueError as error:
        return str(error), []


def test_ranks_share_the_reading_and_compare_their_copies(gloo_prefix: Path, tmp_path: Path):
    prefixes = [Path(shutil.copytree(gloo_prefix.parent, tmp_path / name)) / gloo_prefix.name for name in ("a", "b")]
    shared, apart = (dist.run(of_ranks, 2, both, tmp_path / str(i)) for i, both in enumerate((prefixes[:1] * 2, prefixes)))
    assert shared == [(sha(prefixes[0]), [0]), (sha(prefixes[0]), [])]
    assert apart == [(sha(prefixes[0]), [0])] * 2
    tokens = np.memmap(f"{prefixes[1]}.bin", np.uint16, "r+")
    tokens[4001] += 1
    tokens.flush()
    (first, _), (second, _) = dist.run(of_ranks, 2, prefixes, tmp_path / "2")
    assert first == second
    assert (
        f"the ranks read different data: the training data {prefixes[1]} of rank 1 has other tokens than {prefixes[0]} of rank 0" in first
    )


def test_sources_are_the_files_of_the_training_data(prefix: Path):
    assert order.sources(None) == []
    torch.distributed.destroy_process_group()
    both = {"data_path": ["2", str(prefix), "1", str(prefix)]}
    for settings in (both, {"data_path": [], "mock_data": True, "split": DEFAULT_SPLIT}):
        with tiny.trainer(tiny.config("", **settings, train_iters=1)) as made:
            found = order.sources(made.train_data)
        assert [(name, folder.parent) for name, folder in found] == [(str(prefix), prefix.parent / "index_cache")] * (settings == both)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def test_the_start_does_not_wait(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    """However long reading takes, and whatever else Python does meanwhile."""
    monkeypatch.setattr(Hashing, "_digest", lambda self, stream: time.sleep(0.5) or "a" * 64)
    begun = time.monotonic()
    found = digests_of(monkeypatch, corpus)
    assert found.exchange() > 0
    assert time.monotonic() - begun < 0.4
    assert read(found).digest(str(corpus)) == "a" * 64
