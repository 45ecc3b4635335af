"""A folder of checkpoints: which one is taken, what is said of the others, and what a kill at any moment leaves."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from checkpoints import MARKER

from megatron.lm.checkpoint import folder as module
from megatron.lm.checkpoint.folder import (
    INFO_FILE,
    candidates,
    check_files,
    digest_entries,
    exists,
    iteration_folder,
    iteration_of,
    latest,
    locked,
    marked_iteration,
    new_partial_folder,
    partial_folder,
    prune,
    publish,
    read_info,
    remove,
    write_info,
)
from megatron.lm.checkpoint.versions import VERSION


class Killed(BaseException):
    """What a kill looks like from inside."""


def written(root: Path, iteration: int, text: str = "data", **info: Any) -> Path:
    """A whole checkpoint of one file, ready to be published; returns where it will stand."""
    folder = iteration_folder(root, iteration)
    partial = new_partial_folder(folder)
    (partial / "data").write_text(text)
    write_info(partial, {"version": VERSION, "text": text, "files": digest_entries([partial / "data"])} | info)
    return folder


def published(root: Path, iteration: int, text: str = "data", **info: Any) -> Path:
    folder = written(root, iteration, text, **info)
    publish(folder)
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_names(tmp_path: Path):
    assert iteration_folder(tmp_path, 12).name == "iter_0000012"
    assert iteration_folder(tmp_path, 123456789).name == "iter_123456789"
    assert partial_folder(iteration_folder(tmp_path, 12)).name == "iter_0000012.partial"
    assert [iteration_of(Path(name)) for name in ("iter_0000012", "iter_123456789", "iter_0000012.replaced")] == [12, 123456789, 12]
    assert not any(iteration_of(Path(name)) for name in ("iter_0000012.partial", "iter_12", "0000012", "iter_0000012.old"))


def test_a_published_checkpoint_is_found(tmp_path: Path):
    assert not exists(tmp_path)
    folder = published(tmp_path, 4)
    assert exists(tmp_path)
    assert (tmp_path / MARKER).read_text() == "4"
    assert latest(tmp_path) == folder
    info = read_info(folder)
    assert info["text"] == "data"
    check_files(folder, info["files"])
    assert names(tmp_path) == ["iter_0000004", MARKER]


def test_an_iteration_can_be_named(tmp_path: Path):
    first, _ = published(tmp_path, 2), published(tmp_path, 4)
    assert latest(tmp_path, 2) == first
    with pytest.raises(ValueError, match=r"holds no checkpoint of iteration 3; it holds iterations 2, 4 \(name one by --ckpt-step\)"):
        latest(tmp_path, 3)
    with pytest.raises(ValueError, match="holds no checkpoint of iteration 3; it holds none"):
        latest(tmp_path / "gone", 3)


def test_only_the_marked_one_and_older_ones_are_offered_newest_first(tmp_path: Path):
    for iteration in (2, 8, 4, 6):
        published(tmp_path, iteration)
    assert [path.name for path in candidates(tmp_path)] == ["iter_0000006", "iter_0000004", "iter_0000002"]
    assert [path.name for path in candidates(tmp_path, 8)] == ["iter_0000008"]


def test_a_marked_one_that_is_missing_is_passed_over_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    older = published(tmp_path, 2)
    (tmp_path / MARKER).write_text("4")
    assert latest(tmp_path) == older
    assert capsys.readouterr().out == f"passed over: {tmp_path / 'iter_0000004'} is missing\n"


@pytest.mark.parametrize("marker", [None, "", "release", "9", "\xff"])
def test_a_marker_that_leads_nowhere(tmp_path: Path, marker: str | None):
    published(tmp_path, 4)
    iteration_folder(tmp_path, 4).rename(tmp_path / "away")
    if marker is None:
        (tmp_path / MARKER).unlink()
    else:
        (tmp_path / MARKER).write_bytes(marker.encode("latin1"))
    assert marked_iteration(tmp_path) == (9 if marker == "9" else None)
    said = "names iteration 9, which is missing" if marker == "9" else "is missing or names no iteration; give the folder of an earlier"
    with pytest.raises(ValueError, match=f"{MARKER} {said}"):
        latest(tmp_path)


# What is not a whole checkpoint, and what is said of it.
TORN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no checkpoint.json": (lambda f: (f / INFO_FILE).unlink(), "iter_0000004 is no checkpoint, or one without checkpoint.json"),
    "checkpoint.json of no bytes": (lambda f: (f / INFO_FILE).write_text(""), r"checkpoint\.json cannot be read"),
    "checkpoint.json cut short": (
        lambda f: (f / INFO_FILE).write_bytes((f / INFO_FILE).read_bytes()[:-9]),
        r"checkpoint\.json cannot be read",
    ),
    "checkpoint.json is a list": (lambda f: (f / INFO_FILE).write_text("[]"), r"checkpoint\.json is damaged: its seal"),
    "checkpoint.json was edited": (
        lambda f: (f / INFO_FILE).write_text((f / INFO_FILE).read_text().replace('"text": "new"', '"text": "old"')),
        r"checkpoint\.json is damaged: its seal does not fit",
    ),
    "checkpoint.json is no text": (lambda f: (f / INFO_FILE).write_bytes(b"\xff\xfe"), r"checkpoint\.json cannot be read"),
    "a file missing": (lambda f: (f / "data").unlink(), "data is missing; it should be 3 bytes long"),
    "a file cut short": (lambda f: (f / "data").write_text("ne"), "data is 2 bytes long; it should be 3 bytes long"),
    "a version to come": (
        lambda f: checkpoints.seal(f, version=VERSION + 1),
        f"iter_0000004 has checkpoint version {VERSION + 1}, and this code reads versions 3 to {VERSION}: take the code that wrote it",
    ),
    "a path that leads out": (
        lambda f: checkpoints.seal(f, files={"../iter_0000002/data": {"bytes": 3, "sha256": "0"}}),
        r"checkpoint\.json names '\.\./iter_0000002/data', which is outside its folder",
    ),
    "an absolute path": (
        lambda f: checkpoints.seal(f, files={str(f / "data"): {"bytes": 3, "sha256": "0"}}),
        r"iter_0000004/data', which is outside its folder",
    ),
    "the folder above": (lambda f: checkpoints.seal(f, files={"..": {"bytes": 3, "sha256": "0"}}), r"\.\. is missing"),
}


@pytest.mark.parametrize("what", TORN)
def test_a_torn_one_is_passed_over_with_a_message_or_refused(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]):
    damage, said = TORN[what]
    older = published(tmp_path, 2, "old")
    torn = published(tmp_path, 4, "new")
    damage(torn)
    assert latest(tmp_path) == older
    out = capsys.readouterr().out
    assert out.startswith(f"passed over: {torn}")
    remove(older)
    with pytest.raises(ValueError, match=f"holds no whole checkpoint: .*{said}.*Restore one, or name another folder by --load"):
        latest(tmp_path)
    with pytest.raises(ValueError, match=said):
        read_info(torn)


FOREIGN = {
    "ours, one file a rank": (["mp_rank_00_000.pt", "rng_00000.pt"], "was written by an earlier version of this code"),
    "ours, one file": (["state.pt"], "was written by an earlier version of this code"),
    "Megatron-LM": (["mp_rank_00/model_optim_rng.pt"], "was written by Megatron-LM.*through Hugging Face's format"),
    "Megatron-LM, pipeline": (["mp_rank_00_001/model_optim_rng.pt"], "was written by Megatron-LM"),
    "Megatron-LM, distributed": (["common.pt", ".metadata", "metadata.json", "__0_0.distcp"], "was written by Megatron-LM"),
    "anything": (["notes.txt", "model.safetensors"], "is no checkpoint, or one without checkpoint.json, which is written last"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_others_wrote_is_named(tmp_path: Path, kind: str):
    files, said = FOREIGN[kind]
    (tmp_path / MARKER).write_text("4")
    for name in files:
        file = tmp_path / "iter_0000004" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("theirs")
    with pytest.raises(ValueError, match=said):
        latest(tmp_path)


def test_a_file_of_the_right_size_and_other_contents_is_named(tmp_path: Path):
    folder = published(tmp_path, 4, "new")
    (folder / "data").write_text("nEw")
    info = read_info(folder)
    with pytest.raises(ValueError, match=r"iter_0000004/data is damaged: its SHA-256 is not that in checkpoint\.json"):
        check_files(folder, info["files"])


def test_what_a_kill_left_is_cleared_before_writing(tmp_path: Path):
    partial = partial_folder(iteration_folder(tmp_path, 4))
    partial.mkdir()
    (partial / "left").write_text("half")
    published(tmp_path, 4)
    assert names(tmp_path) == ["iter_0000004", MARKER]
    assert names(tmp_path / "iter_0000004") == [INFO_FILE, "data"]


# A kill at every moment


def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> list[str]:
    """From now on the process dies before its call number `after` (from 0) that changes the disk; the calls it came to."""
    calls: list[str] = []

    def replace(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if len(calls) >= after:
                raise Killed
            calls.append(name)
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        replace(name)
    return calls


def save_new(root: Path) -> None:
    publish(written(root, 6, "new"))
    prune(root, 1)


def save_again(root: Path) -> None:
    publish(written(root, 4, "new"))
    prune(root, 1)


@pytest.mark.parametrize(("save", "least"), [(save_new, 14), (save_again, 14)])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], None], least: int
):
    seen = []
    for after in range(200):
        root = tmp_path / str(after)
        published(root, 2, "older")
        published(root, 4, "old")
        with monkeypatch.context() as patch:
            calls = dying(patch, after)
            try:
                save(root)
            except Killed:
                ended = False
            else:
                ended = True
        folder = latest(root)
        info = read_info(folder)
        check_files(folder, info["files"])
        assert info["text"] == (folder / "data").read_text()
        seen.append(info["text"])
        assert seen[-1] in ("old", "new"), (after, calls)
        # Nobody who looks for a checkpoint meets half of one.
        assert all((path / "data").is_file() for path in root.iterdir() if iteration_of(path) is not None)
        save(root)  # the next save clears up
        assert names(root) == [f"iter_{marked_iteration(root):07d}", MARKER], (after, calls)
        if ended:
            break
    assert seen == ["old"] * seen.count("old") + ["new"] * seen.count("new")
    assert ended
    assert len(calls) >= least
    assert min(seen.count("old"), seen.count("new")) > 3


def test_prune_keeps_the_newest_and_the_marked_one(tmp_path: Path):
    for iteration in (2, 4, 6, 8):
        published(tmp_path, iteration)
    (tmp_path / MARKER).write_text("6")  # a run that went back
    prune(tmp_path, 2)
    assert names(tmp_path) == ["iter_0000004", "iter_0000006", "iter_0000008", MARKER]
    prune(tmp_path, 1)
    assert names(tmp_path) == ["iter_0000006", "iter_0000008", MARKER]
    prune(tmp_path, 5)
    assert names(tmp_path) == ["iter_0000006", "iter_0000008", MARKER]


def test_prune_counts_no_replaced_one_before_the_one_in_its_place(tmp_path: Path):
    first, second = published(tmp_path, 2), published(tmp_path, 4)
    second.rename(second.with_name("iter_0000004.replaced"))
    published(tmp_path, 4, "new")
    first.rename(first.with_name("iter_0000004.replaced"))  # as a kill leaves it: publishing has removed the one before
    prune(tmp_path, 1)
    assert names(tmp_path) == ["iter_0000004", MARKER]


def test_prune_leaves_what_it_does_not_know(tmp_path: Path):
    for name in ("iter_0000001", "iter_0000002.old", "notes", "iter_0000009.partial"):  # the first is another code's
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "common.pt").write_text("theirs")
    prune(tmp_path, 1)  # no marker: nothing is known
    for iteration in (2, 4):
        published(tmp_path, iteration)
    prune(tmp_path, 1)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002.old", "iter_0000004", "iter_0000009.partial", MARKER, "notes"]


# Two jobs


def hold(root: Path, told: Connection, forks: bool) -> None:
    """Another job: holds the folder until it is killed."""
    with locked(root):
        if forks and not os.fork():
            time.sleep(60)  # what a worker of the data loader does after the death of its trainer, for some seconds
            os._exit(0)
        told.send(True)
        time.sleep(60)


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with-workers"])
def test_the_second_job_in_a_folder_is_refused_until_the_first_is_gone(tmp_path: Path, forks: bool):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    other = context.Process(target=in_own_group, args=(tmp_path / "save", there, forks))
    other.start()
    try:
        assert here.poll(30)
        said = f"is in use by process {other.pid} on .*two jobs in one folder would lose checkpoints: end it, or give another --save"
        with pytest.raises(ValueError, match=said), locked(tmp_path / "save"):
            pass
        assert other.pid is not None
        os.kill(other.pid, signal.SIGKILL)
        other.join()
        with locked(tmp_path / "save"):
            assert f"process {os.getpid()} on" in (tmp_path / "save" / ".lock").read_text()
    finally:
        os.killpg(other.pid, signal.SIGKILL) if forks else other.kill()
        other.join()
    with locked(tmp_path / "save"):  # free again, whoever held it last
        pass


def in_own_group(root: Path, told: Connection, forks: bool) -> None:
    os.setpgid(0, 0)
    hold(root, told, forks)


@pytest.mark.parametrize("what", ["below a file", "is a file"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, what: str):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "save" if what == "below a file" else tmp_path / "file"
    with pytest.raises(ValueError, match=r"--save .* cannot be written \(.*\); give another folder, or the right to write"), locked(root):
        pass


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **options: object) -> None:  # by hand, because root may write everywhere
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\)"), locked(tmp_path):
        pass


def test_the_seal_covers_all_but_itself(tmp_path: Path):
    folder = published(tmp_path, 4, nested={"b": [1, None, 2.5], "a": "ü"})
    text = (folder / INFO_FILE).read_text(encoding="utf-8")
    assert json.loads(text)["seal"] == module.read_info(folder)["seal"]
    (folder / INFO_FILE).write_text(text.replace("2.5", "2.25"), encoding="utf-8")
    with pytest.raises(ValueError, match="its seal does not fit its contents"):
        read_info(folder)
