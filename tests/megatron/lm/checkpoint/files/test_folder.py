"""A folder of checkpoints: which one is taken, what is said of the others, and what a kill at any moment leaves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import checkpoints
from helpers.checkpoints import MARKER, of, published, written
from helpers.kills import Killed, dying
from megatron.lm.checkpoint.files import folder as module
from megatron.lm.checkpoint.files import non_persistent
from megatron.lm.checkpoint.files.folder import (
    INFO_FILE,
    candidates,
    check_files,
    exists,
    iteration_folder,
    latest,
    prune,
    publish,
    read_info,
    refuse_other_run,
    remove,
    tidy,
)
from megatron.lm.checkpoint.files.versions import VERSION
from megatron.lm.checkpoint.loading import newest
from megatron.lm.config import CheckpointConfig
from megatron.lm.training.run_record import Run, health_problem

DEAD = "iteration 6 was skipped"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.promise("Checkpoints", "A marker that names a valid checkpoint is followed, and newer ones are mentioned.")
def test_only_the_marked_one_and_older_ones_are_offered_newest_first(tmp_path: Path):
    for iteration in (2, 8, 4, 6):
        published(tmp_path, iteration)
    offered = candidates(tmp_path)
    assert [path.name for path in offered.folders] == ["iter_0000006", "iter_0000004", "iter_0000002"]
    assert offered.remarks == [f"{tmp_path / MARKER} names iteration 6: newer ones, 8, are ignored (choose one with --ckpt-step)"]
    assert [path.name for path in candidates(tmp_path, 8).folders] == ["iter_0000008"]


@pytest.mark.promise("Checkpoints", "Without a readable marker the newest healthy checkpoint is used, and the marker is rewritten.")
@pytest.mark.parametrize("marker", [None, "", "release", "\xff"])
def test_a_marker_that_is_missing_or_unreadable_means_the_newest_healthy_one(
    tmp_path: Path, marker: str | None, capsys: pytest.CaptureFixture[str]
):
    for iteration in (2, 4):
        published(tmp_path, iteration)
    dead = published(tmp_path, 6, problem=DEAD)
    if marker is None:
        (tmp_path / MARKER).unlink()
    else:
        (tmp_path / MARKER).write_bytes(marker.encode("latin1"))
    assert exists(tmp_path)
    assert latest(tmp_path) == iteration_folder(tmp_path, 4)
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / MARKER} is missing or invalid: using the newest healthy checkpoint",
        f"passed over: {dead} is unhealthy: {DEAD} (--ckpt-step 6 --load-unhealthy loads it)",
    ]
    assert tidy(tmp_path) == [f"rewrote {tmp_path / MARKER} with iteration 4"]
    assert (tmp_path / MARKER).read_text() == "4"
    assert tidy(tmp_path) == []


@pytest.mark.promise("Checkpoints", "An unhealthy checkpoint is loaded only by `--ckpt-step` with `--load-unhealthy`.")
def test_an_unhealthy_one_moves_no_marker_and_is_taken_only_by_name_and_flag(tmp_path: Path):
    good, dead = published(tmp_path, 4), published(tmp_path, 6, problem=DEAD)
    assert latest(tmp_path) == good
    with pytest.raises(ValueError, match=rf"has no complete healthy checkpoint: {dead} is unhealthy: {DEAD} \(--ckpt-step 6 --load-un"):
        latest(tmp_path, 6)
    assert latest(tmp_path, 6, unhealthy=True) == dead
    (tmp_path / MARKER).write_text("6")
    assert latest(tmp_path) == good


@pytest.mark.promise("Checkpoints", "No fallback loads a checkpoint of another run.")
def test_no_fallback_leads_to_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mine, other = Run(), Run()
    first, foreign = published(tmp_path, 2, **of(mine)), published(tmp_path, 4, **of(other))
    unnamed, torn = published(tmp_path, 5), published(tmp_path, 6, **of(mine))
    (torn / "data").unlink()
    assert latest(tmp_path) == first
    said = capsys.readouterr().out
    assert f"passed over: {foreign} is a checkpoint of another run" in said
    assert f"passed over: {unnamed} is a checkpoint of another run" in said
    remove(first)
    with pytest.raises(ValueError, match="has no complete healthy checkpoint"):
        latest(tmp_path)


def test_a_folder_of_another_run_is_refused_with_the_ways_out(tmp_path: Path):
    mine = Run()
    refuse_other_run(tmp_path / "missing", mine)
    refuse_other_run(tmp_path, mine)
    published(tmp_path, 4, **of(mine))
    refuse_other_run(tmp_path, mine)
    (tmp_path / MARKER).unlink()
    said = (
        rf"contains another run \(iteration 4 of {mine.id[:8]}\), and saving .* --load {tmp_path} --save {tmp_path} to resume it, another"
    )
    with pytest.raises(ValueError, match=said):
        refuse_other_run(tmp_path, Run(adopted=True))
    (iteration_folder(tmp_path, 4) / INFO_FILE).unlink()
    with pytest.raises(ValueError, match="contains checkpoints that cannot be read, and saving there would lose it"):
        refuse_other_run(tmp_path, mine)


@pytest.mark.promise("Checkpoints", "A folder renamed to another iteration is not a checkpoint.")
def test_a_renamed_folder_is_no_checkpoint_of_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = published(tmp_path, 2)
    renamed = published(tmp_path, 4).rename(tmp_path / "iter_0000009")
    (tmp_path / MARKER).write_text("9")
    assert latest(tmp_path) == good
    assert f"passed over: {renamed} contains iteration 4: the folder was renamed; restore its name" in capsys.readouterr().out


# What is not a whole checkpoint, and what is said of it.
TORN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no checkpoint.json": (lambda f: (f / INFO_FILE).unlink(), "iter_0000004 is not a checkpoint, or has no checkpoint.json"),
    "checkpoint.json of no bytes": (lambda f: (f / INFO_FILE).write_text(""), r"checkpoint\.json cannot be read"),
    "checkpoint.json cut short": (
        lambda f: (f / INFO_FILE).write_bytes((f / INFO_FILE).read_bytes()[:-9]),
        r"checkpoint\.json cannot be read",
    ),
    "checkpoint.json is a list": (lambda f: (f / INFO_FILE).write_text("[]"), r"checkpoint\.json is damaged: its seal"),
    "checkpoint.json was edited": (
        lambda f: (f / INFO_FILE).write_text((f / INFO_FILE).read_text().replace('"text": "new"', '"text": "old"')),
        r"checkpoint\.json is damaged: its seal does not match",
    ),
    "checkpoint.json is no text": (lambda f: (f / INFO_FILE).write_bytes(b"\xff\xfe"), r"checkpoint\.json cannot be read"),
    "a file missing": (lambda f: (f / "data").unlink(), "data is missing; expected 3 bytes"),
    "a file cut short": (lambda f: (f / "data").write_text("ne"), "data is 2 bytes long; expected 3 bytes"),
    "a version to come": (
        lambda f: checkpoints.seal(f, version=VERSION + 1),
        f"iter_0000004 has checkpoint version {VERSION + 1}, but this code reads versions 5 to {VERSION}: use the version that wrote it",
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
    with pytest.raises(ValueError, match=f"has no complete healthy checkpoint: .*{said}.*Restore one, or choose another --load"):
        latest(tmp_path)
    with pytest.raises(ValueError, match=said):
        read_info(torn)


def test_a_file_of_the_right_size_and_other_contents_is_named(tmp_path: Path):
    folder = published(tmp_path, 4, "new")
    (folder / "data").write_text("nEw")
    info = read_info(folder)
    with pytest.raises(ValueError, match=r"iter_0000004/data is damaged: its SHA-256 is not that in checkpoint\.json"):
        check_files(folder, info["files"])


# A kill at every moment: of a whole save, ../test_saving.py


def test_prune_keeps_the_newest_up_to_the_one_just_saved(tmp_path: Path):
    folders = {iteration: published(tmp_path, iteration) for iteration in (2, 4, 6, 8)}
    prune(folders[6], 2)  # of a run that went back: 8 is newer
    assert names(tmp_path) == ["iter_0000004", "iter_0000006", "iter_0000008", MARKER]
    prune(folders[6], 1)
    assert names(tmp_path) == ["iter_0000006", "iter_0000008", MARKER]
    prune(folders[6], 5)
    assert names(tmp_path) == ["iter_0000006", "iter_0000008", MARKER]


@pytest.mark.promise("Checkpoints", "`--keep-last` never deletes the newest healthy checkpoint.")
def test_prune_never_removes_the_newest_healthy_one(tmp_path: Path):
    for iteration in (2, 4):
        published(tmp_path, iteration)
    for iteration in (6, 8, 10):
        prune(published(tmp_path, iteration, problem=DEAD), 2)
    assert names(tmp_path) == ["iter_0000004", "iter_0000008", "iter_0000010", MARKER]
    prune(published(tmp_path, 12, problem=DEAD), 1)
    assert names(tmp_path) == ["iter_0000004", "iter_0000012", MARKER]
    prune(published(tmp_path, 14), 1)
    assert names(tmp_path) == ["iter_0000014", MARKER]


@pytest.mark.promise("Checkpoints", "`--keep-last 1` leaves a complete healthy checkpoint at every moment, also when killed.")
@pytest.mark.parametrize("healthy", [True, False])
def test_a_kill_at_any_moment_of_keep_last_1_leaves_a_whole_healthy_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healthy: bool
):
    """`healthy`: whether the later checkpoints are."""
    for after in range(200):
        root, run = tmp_path / str(after), of(Run())
        published(root, 2, **run)
        with monkeypatch.context() as patch:
            dying(patch, after)
            try:
                for iteration in (4, 6):
                    publish(written(root, iteration, health={"problem": None if healthy else DEAD}, **run), mark=healthy)
                    prune(iteration_folder(root, iteration), 1)
            except Killed:
                ended = False
            else:
                ended = True
        folder = latest(root)
        info = read_info(folder)
        check_files(folder, info["files"])
        assert health_problem(info) is None
        if ended:
            break
    assert names(root) == [*([] if healthy else ["iter_0000002"]), "iter_0000006", MARKER]
    assert after > 10


def test_prune_leaves_other_runs_alone(tmp_path: Path):
    mine = of(Run())
    published(tmp_path, 1)
    published(tmp_path, 2, **of(Run()))
    for iteration in (4, 6):
        published(tmp_path, iteration, **mine)
    prune(published(tmp_path, 8, **mine), 1)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000008", MARKER]


def test_the_seal_covers_all_but_itself(tmp_path: Path):
    folder = published(tmp_path, 4, nested={"b": [1, None, 2.5], "a": "ü"})
    text = (folder / INFO_FILE).read_text(encoding="utf-8")
    assert json.loads(text)["seal"] == module.read_info(folder)["seal"]
    (folder / INFO_FILE).write_text(text.replace("2.5", "2.25"), encoding="utf-8")
    with pytest.raises(ValueError, match="its seal does not match its contents"):
        read_info(folder)


# The folder of non-persistent checkpoints beside `--save`, and which of both a start takes.


RUN = Run()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with persistent checkpoints of 10 and 20, and a non-persistent one of 25."""
    for iteration in (10, 20):
        published(tmp_path, iteration, **of(RUN))
    published(tmp_path / "non_persistent", 25, **of(RUN))
    return tmp_path


def settings(root: Path, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(load=str(root), save=str(root), **{"non_persistent_save_interval": 5} | more)


def offered(settings: CheckpointConfig) -> list[int]:
    return [read_info(folder)["iteration"] for folder in non_persistent.candidates_of(settings).folders]


def test_the_newer_of_both_folders_comes_first(root: Path):
    assert offered(settings(root)) == [25, 20, 10]
    published(root, 30, **of(RUN))
    assert offered(settings(root)) == [30, 25, 20, 10]
    published(root / "non_persistent", 35, **of(Run()))  # another run's, which takes that folder
    assert offered(settings(root)) == [30, 20, 10]


def test_a_named_iteration_is_found_in_either(root: Path):
    assert offered(settings(root, ckpt_step=25)) == [25]
    assert offered(settings(root, ckpt_step=10)) == [10]
    with pytest.raises(ValueError, match="has no checkpoint of iteration 7"):
        newest(settings(root, ckpt_step=7))


def test_a_damaged_one_is_passed_over_for_an_older_one_of_the_other_folder(root: Path):
    (root / "non_persistent" / "iter_0000025" / "checkpoint.json").write_text("{")
    assert newest(settings(root)) == iteration_folder(root, 20)


def test_what_the_run_went_back_behind_is_deleted(root: Path):
    assert non_persistent.forget(root / "non_persistent", 25) == []
    lines = non_persistent.forget(root / "non_persistent", 20)
    assert lines == [f"deleted {root}/non_persistent/iter_0000025: the run went back to iteration 20"]
    assert offered(settings(root)) == [20, 10]
