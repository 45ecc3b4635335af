"""A token changed between the samples that a resume compares: it is refused at once, or before the next save; nothing passes silently."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import dist, tiny
from megatron.lm.checkpoint.files.folder import read_info
from megatron.lm.data.reading import order, token_digests
from megatron.lm.data.reading.token_digests import Hashing, TokenDigests
from megatron.lm.run import token_check

SMALLEST = {"num_layers": 1, "precision": "bf16", "train_iters": 2}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of which samples cover only the two ends, and whose digest no start keeps for the next."""
    monkeypatch.setattr(token_digests, "_RECENT", 1e9)
    monkeypatch.setattr(order, "_PARTS", 2)
    monkeypatch.setattr(order, "_PART_BYTES", 64)
    return tiny.write_data(tmp_path / "data")


def change_a_token(prefix: Path) -> None:
    tokens = np.memmap(f"{prefix}.bin", np.uint16, "r+")
    tokens[4001] = (tokens[4001] + 1) % 59
    tokens.flush()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and the next run's data are read only when a save waits for them, or the run ends."""
    return slow_reading(monkeypatch)


def slow_reading(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    waited, whole = threading.Event(), Hashing._digest
    waits, closes = TokenDigests.wait, TokenDigests.close

    def begin() -> None:
        waited.clear()
        patch.setattr(token_check, "SMALL", 0)
        patch.setattr(Hashing, "_digest", lambda self, stream: whole(self, stream) if waited.wait(60) else None)
        patch.setattr(TokenDigests, "wait", lambda self, seconds: (waited.set(), waits(self, seconds)))
        patch.setattr(TokenDigests, "close", lambda self: (waited.set(), closes(self)))

    return begin


def run(corpus: Path, **settings: Any) -> None:
    tiny.run(tiny.config(corpus, **SMALLEST | settings))


def saved(corpus: Path, folder: Path, **settings: Any) -> Path:
    run(corpus, save=str(folder), **settings)
    return folder


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def digest_in(folder: Path, iteration: int) -> str | None:
    found: str | None = read_info(folder / f"iter_{iteration:07d}")["data"]["datasets"][0]["whole"]
    return found


@pytest.mark.promise("Data", "A resume with a changed token anywhere in the data is refused at the start, or before its next save.")
def test_a_resume_with_a_changed_token_is_refused(corpus: Path, tmp_path: Path):
    folder = saved(corpus, tmp_path / "save")
    assert len(str(digest_in(folder, 2))) == 64
    run(corpus, load=str(folder), train_iters=3)
    change_a_token(corpus)
    with pytest.raises(
        ValueError, match=r"corpus has other tokens than .*corpus, in documents of the same lengths\. Use the saved"
    ) as caught:
        run(corpus, load=str(folder), save=str(folder), train_iters=4)
    assert "\n" not in str(caught.value)
    run(corpus, load=str(folder), train_iters=3, finetune=True)


def test_of_large_data_the_next_save_is_refused(corpus: Path, tmp_path: Path, slow: Callable[[], None]):
    folder = saved(corpus, tmp_path / "save")
    change_a_token(corpus)
    slow()
    with pytest.raises(
        ValueError, match=r"corpus\.bin has other tokens than when the checkpoint in .*save was written .*--override"
    ) as caught:
        run(corpus, load=str(folder), save=str(folder), train_iters=4, save_interval=1)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000002"]


def test_a_save_of_a_resumed_run_waits(corpus: Path, tmp_path: Path, slow: Callable[[], None], capsys: pytest.CaptureFixture[str]):
    folder = saved(corpus, tmp_path / "save")
    slow()
    run(corpus, load=str(folder), save=str(folder), train_iters=4, save_interval=1)
    assert f"GB of the training data are not hashed yet, and all tokens must equal the checkpoint's in {folder}" in said(capsys)
    assert digest_in(folder, 3) == digest_in(folder, 2)


def test_a_run_that_must_leave_does_not_wait(corpus: Path, tmp_path: Path, slow: Callable[[], None], capsys: pytest.CaptureFixture[str]):
    folder = saved(corpus, tmp_path / "save")
    change_a_token(corpus)
    slow()
    with tiny.trainer(tiny.config(corpus, **SMALLEST | {"load": str(folder), "save": str(folder), "train_iters": 9})) as made:
        made.requests._asked.add(signal.SIGTERM)
        assert made.run() == "SIGTERM"
    assert "this run leaves before all tokens were compared with the checkpoint's, and the next resume compares them" in said(capsys)
    newest = max(path.name for path in folder.glob("iter_*"))
    assert newest > "iter_0000002"
    assert digest_in(folder, int(newest[5:])) == digest_in(folder, 2)
    slow()
    with pytest.raises(ValueError, match="has other tokens than"):
        run(corpus, load=str(folder), save=str(folder), train_iters=9)


def test_a_new_run_does_not_wait_and_says_so(corpus: Path, tmp_path: Path, slow: Callable[[], None], capsys: pytest.CaptureFixture[str]):
    slow()
    folder = saved(corpus, tmp_path / "save")
    assert digest_in(folder, 2) is None
    assert "not hashed yet: this checkpoint has digests only of samples of its tokens" in said(capsys)
    run(corpus, load=str(folder), save=str(folder), train_iters=3)
    assert "the checkpoint has no digest of all tokens of" in said(capsys)
    assert len(str(digest_in(folder, 3))) == 64


def test_other_tokens_that_are_accepted(corpus: Path, tmp_path: Path, slow: Callable[[], None], capsys: pytest.CaptureFixture[str]):
    folder = saved(corpus, tmp_path / "save")
    before = digest_in(folder, 2)
    change_a_token(corpus)
    slow()
    run(corpus, load=str(folder), save=str(folder), train_iters=3, override_data=True)
    assert "--override-data: " in said(capsys)
    assert digest_in(folder, 3) not in (None, before)


def test_a_run_that_saves_nothing_says_what_it_did_not_compare(
    corpus: Path, tmp_path: Path, slow: Callable[[], None], capsys: pytest.CaptureFixture[str]
):
    folder = saved(corpus, tmp_path / "save")
    slow()
    run(corpus, load=str(folder), train_iters=3)
    assert "the run ends before all its tokens were compared with the checkpoint's" in said(capsys)


def on_ranks(corpus: str, folder: str, settings: dict[str, Any]) -> str:
    """What a rank of a run says that ends, where the data of a resumed run are read slowly."""
    order._PARTS, order._PART_BYTES = 2, 64
    with pytest.MonkeyPatch.context() as patch:
        if "load" in settings:
            slow_reading(patch)()
        try:
            run(Path(corpus), **{"save": folder, "global_batch_size": 8, "train_iters": 2} | settings)
        except ValueError as error:
            return str(error)
    return ""


def test_all_ranks_refuse_it_before_the_next_save(corpus: Path, gloo_prefix: Path, tmp_path: Path):
    folder = str(tmp_path / "save")
    assert dist.run(on_ranks, 2, str(corpus), folder, {}) == ["", ""]
    change_a_token(corpus)
    first, second = dist.run(on_ranks, 2, str(corpus), folder, {"load": folder, "train_iters": 4, "save_interval": 1})
    assert first == second
    assert "corpus.bin has other tokens than when the checkpoint in" in first
    assert sorted(path.name for path in (tmp_path / "save").glob("iter_*")) == ["iter_0000002"]
