"""Reading files that another process is writing: appended, cut by a resume, replaced, torn, or of another kind."""

import json
from pathlib import Path

import pytest

from helpers import watched
from helpers.watched import START, lines, record, train
from megatron.lm.tools.watch import run_files
from megatron.lm.tools.watch.run_files import GrowingFile, WatchedRun, last_step, runs_below


def iterations(run: WatchedRun) -> list[int]:
    return [line["iteration"] for line in run.train]


def test_only_complete_lines_are_taken_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = GrowingFile(path)
    assert file.lines() == (False, [])  # not there yet
    path.write_bytes(b"one\ntwo\nthr")
    assert file.lines() == (False, [b"one\n", b"two\n"])
    assert file.lines() == (False, [])
    with path.open("ab") as stream:
        stream.write(b"ee\n")
    assert file.lines() == (False, [b"three\n"])


@pytest.mark.parametrize("after", [b"one\n", b"one\nother\nthree\nfour\n", b""], ids=["cut", "cut and written on", "emptied"])
def test_a_cut_file_is_read_again_even_if_it_is_longer_by_now(tmp_path: Path, after: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    file = GrowingFile(path)
    file.lines()
    if after.startswith(b"one\nother"):
        after = after.replace(b"three\n", b"x\n")  # so that the last line read is not where it was
    path.write_bytes(after)
    assert file.lines() == (True, after.splitlines(keepends=True))
    assert file.lines() == (False, [])


def test_a_removed_file_is_empty_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"one\n")
    file = GrowingFile(path)
    file.lines()
    path.unlink()
    assert file.lines() == (True, [])


def test_a_run_that_repeats_iterations_shows_them_once(tmp_path: Path) -> None:
    """After a rollback, after a kill before a checkpoint, and after a second start in the same file."""
    path = lines(
        tmp_path / "m.jsonl", START, *(train(i) for i in (1, 2, 3, 4)), {"kind": "rollback", "iteration": 4, "to": 2}, train(3, 2.5)
    )
    run = WatchedRun(name="a", metrics=path)
    run.update()
    assert (iterations(run), run.train[-1]["loss"]) == ([1, 2, 3], 2.5)
    assert list(run.events) == ["iteration 4: rolled back to iteration 2"]
    lines(path, START | {"start": 0}, train(1), more=True)
    run.update()
    assert (iterations(run), run.starts) == ([1], 2)


def test_what_is_no_entry_is_counted_and_left_out(tmp_path: Path) -> None:
    path = lines(tmp_path / "m.jsonl", START, train(1), train(2) | {"loss": "low"}, train("3"), {"kind": "valid", "iteration": 2})
    with path.open("a") as stream:
        stream.write('not json\n[1]\n{"kind": "train", "iter\n\n')
    run = WatchedRun(name="a", metrics=path)
    run.update()
    assert (iterations(run), run.valid, run.unreadable) == ([1], [], 6)
    path.unlink()
    run.update()
    assert (run.train, run.start, run.unreadable, run.modified) == ([], None, 0, 0.0)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"kind": "spike", "iteration": 7, "loss": 9.5, "mean": 3.0}, "iteration 7: loss 9.5 is a spike over its mean of 3"),
        ({"kind": "skipped", "iteration": 7, "tensors": {}}, "iteration 7: update skipped, a gradient was not finite"),
        ({"kind": "empty", "iteration": 7}, "iteration 7: update skipped, the batch had no token to train on"),
        (
            {"kind": "fp8_guard", "iteration": 7, "layer": "a.fc1", "raised": True, "why": "SQNR 9 dB"},
            "iteration 7: a.fc1 raised to BF16 (SQNR 9 dB)",
        ),
        ({"kind": "lost_updates", "iteration": 7, "lr": 1e-5, "layers": {"a": 0.9}}, "iteration 7: updates are lost in 1 layers"),
        ({"kind": "test", "iteration": 7}, None),
    ],
)
def test_what_happened_is_said(entry: dict, words: str | None) -> None:
    assert run_files.sentence(entry) == words


def test_the_last_complete_step_is_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(tmp_path / "p.jsonl", 5, 10, 15)
    assert last_step(tmp_path / "none.jsonl") is None
    for block in (7, 100, 1 << 20):
        monkeypatch.setattr(run_files, "BLOCK", block)
        step = last_step(path)
        assert step is not None
        assert step["iteration"] == 15
        assert step["series"]["a.fc1", "input"]["underflow"] == 0.15
    with path.open("a") as stream:
        stream.write('{"iteration": 20, "cas')
    assert last_step(path)["iteration"] == 15  # type: ignore[index]
    with path.open("a") as stream:
        stream.write("\n")  # the kill's line, which a resumed run completes
    assert last_step(path)["iteration"] == 15  # type: ignore[index]
    path.write_text('{"iteration": 1')
    assert last_step(path) is None
    assert last_step(record(path, 3))["iteration"] == 3  # type: ignore[index]


def test_underflow_is_that_of_the_linear_layers(tmp_path: Path) -> None:
    run = WatchedRun(name="a", metrics=tmp_path / "m.jsonl", record=record(tmp_path / "p.jsonl", 10))
    run.update()
    assert run.underflow() == {"a.fc1": {"input": 0.1, "grad_output": 0.0}, "b.fc1": {"input": 0.0}}


def test_the_runs_of_a_folder_are_found_with_their_records(tmp_path: Path) -> None:
    watched.folder(tmp_path / "O0", record_too=False)
    watched.folder(tmp_path / "O2")
    lines(tmp_path / "O2" / "other.jsonl", {"anything": 1})
    found = {run.name: run for run in runs_below(tmp_path)}
    assert found.keys() == {"O0", "O2"}
    assert (found["O0"].record, found["O2"].record) == (None, tmp_path / "O2" / "precision.jsonl")
    (alone,) = runs_below(tmp_path / "O2" / "metrics.jsonl")
    assert (alone.name, alone.record) == ("O2", tmp_path / "O2" / "precision.jsonl")


def test_two_runs_in_one_folder_are_two_and_their_record_is_nobodys(tmp_path: Path) -> None:
    watched.folder(tmp_path)
    lines(tmp_path / "second.jsonl", START)
    runs = runs_below(tmp_path)
    assert {run.name for run in runs} == {"metrics.jsonl", "second.jsonl"}
    assert all(run.record is None for run in runs)
    assert f"{tmp_path} has 2 metrics files and 1 precision records: give each run its own folder" in {run.unclear for run in runs}


def test_an_empty_file_is_a_run_that_has_not_started(tmp_path: Path) -> None:
    assert runs_below(tmp_path) == []
    (tmp_path / "metrics.jsonl").touch()
    (run,) = runs_below(tmp_path)
    run.update()
    assert (run.start, run.starts) == (None, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"x.jsonl does not exist: give a run's folder"),
        ("hello\n", r"x.jsonl is not a metrics file: give the file of the trainer's --metrics-file, or its folder"),
        (json.dumps({"iteration": 1, "columns": {}, "casts": {}}), "x.jsonl is a precision record: give the file of"),
    ],
)
def test_another_path_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        runs_below(path)
