"""Rows that survive a run that was cut off."""

import dataclasses
import threading
from pathlib import Path

import pytest

from tools.reproduce import keep
from tools.reproduce.entry import Entry, Finding, Needs

TEXT = Path("text")


def entry(ran, fails=""):
    def run(task):
        ran.append(task.piece)
        if task.piece == fails:
            raise RuntimeError("killed")
        yield Finding(f"{task.piece} of {task.size}", len(ran), 2.0, "dB", seed=7)
        yield Finding("curve", 0.1234567, x=3.0)

    return Entry(
        name="a-b",
        title="A",
        claim="C.",
        run=run,
        sizes={"toy": Needs(), "full": Needs()},
        pieces=dict.fromkeys(("toy", "full"), ("one", "two", "three")),
    )


def rows(one, size, folder, again=False):
    return [row for _, found in keep.run(one, size, TEXT, folder, "abc1234", again) for row in found]


def test_a_run_that_was_cut_off_goes_on_with_what_is_missing(tmp_path):
    ran = []
    with pytest.raises(RuntimeError, match="killed"):
        rows(entry(ran, "two"), "toy", tmp_path)
    assert ran == ["one", "two"]
    assert keep.missing(entry(ran), "toy", keep.read(tmp_path / "a-b.csv")) == ["two", "three"]
    again = rows(entry(ran), "toy", tmp_path)
    assert ran == ["one", "two", "two", "three"]
    assert [row["piece"] for row in again] == ["two", "two", "three", "three"]
    assert rows(entry(ran), "toy", tmp_path) == []
    assert not list(tmp_path.glob("*.partial"))


def test_two_calls_beside_each_other_keep_both_pieces(tmp_path):
    """Both have read the file before either writes."""
    one, other = (keep.run(entry([]), "toy", TEXT, tmp_path, "abc1234", False, [piece]) for piece in ("one", "two"))
    third = keep.run(entry([]), "toy", TEXT, tmp_path, "abc1234", True, ["one", "three"])
    next(one)
    assert next(third)[0] == "one"
    next(other)
    assert next(third)[0] == "three"
    assert [row["piece"] for row in keep.read(tmp_path / "a-b.csv")] == ["one", "one", "two", "two", "three", "three"]


def test_rows_hold_the_finding_and_where_it_was_made(tmp_path):
    first, curve = rows(entry([]), "toy", tmp_path)[:2]
    assert {key: first[key] for key in ("quantity", "ours", "paper", "unit", "seed", "x", "commit")} == {
        "quantity": "one of toy", "ours": "1", "paper": "2", "unit": "dB", "seed": "7", "x": "", "commit": "abc1234",
    }  # fmt: skip
    assert (curve["x"], curve["ours"], curve["paper"]) == ("3", "0.123457", "")
    assert first["command"] == "python -m tools.reproduce a-b --size toy --text text"
    own = next(keep.run(entry([]), "full", Path(keep.OWN_TEXT), tmp_path, "abc1234", False))[1]
    assert own[0]["command"] == "python -m tools.reproduce a-b --size full"


def test_sizes_stand_side_by_side_and_again_forgets_one(tmp_path):
    ran = []
    rows(entry(ran), "toy", tmp_path)
    rows(entry(ran), "full", tmp_path)
    rows(entry(ran), "toy", tmp_path, again=True)
    assert ran == ["one", "two", "three"] * 3
    found = keep.read(tmp_path / "a-b.csv")
    assert {size: sum(row["size"] == size for row in found) for size in ("toy", "full")} == {"toy": 6, "full": 6}


def test_files_are_kept_from_call_to_call_until_it_runs_again(tmp_path):
    kept, other = tmp_path / "kept" / "a-b" / "trials.csv", tmp_path / "kept" / "b-c" / "trials.csv"
    for file in (kept, other):
        file.parent.mkdir(parents=True)
        file.write_text("ms\n1\n")
    rows(entry([]), "toy", tmp_path)
    assert kept.exists()
    rows(entry([]), "toy", tmp_path, again=True)
    assert not kept.exists()
    assert other.exists()


def test_a_piece_without_findings_and_a_foreign_file_are_refused(tmp_path):
    empty = Entry(name="a-b", title="A", claim="C.", run=lambda task: [], sizes={"toy": Needs()})
    with pytest.raises(ValueError, match="a-b, piece whole, has no results"):
        rows(empty, "toy", tmp_path)
    (tmp_path / "a-b.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match=r"is not a results file of tools\.reproduce"):
        rows(entry([]), "toy", tmp_path)


def test_a_piece_that_fails_beside_others_costs_none_of_them(tmp_path):
    meeting = threading.Barrier(2, timeout=20)

    def run(task):
        meeting.wait()
        if task.piece == "one":
            raise RuntimeError("killed")
        yield Finding(task.piece, 1.0)

    one = dataclasses.replace(entry([]), run=run, apart=True)
    with pytest.raises(RuntimeError, match="killed"):
        list(keep.run(one, "toy", TEXT, tmp_path, "abc1234", False, ["one", "two"], at_once=2))
    assert keep.missing(one, "toy", keep.read(tmp_path / "a-b.csv")) == ["one", "three"]


def test_computed_results_are_replaced_where_a_value_or_its_source_has_changed(tmp_path):
    """The other rows keep the day and tree on which they were first computed."""
    source = {"value": 1.0, "commit": "old1234"}

    def run(task):
        if task.piece == "read":
            yield Finding("speed", source["value"], where={"commit": source["commit"], "date": "2026-11-20"})
        else:
            yield Finding("size", 3.0000001, unit="GiB")

    sizes = {"toy": Needs(), "kept": Needs(computed=True)}
    one = Entry(name="a-b", title="A", claim="C.", run=run, sizes=sizes, pieces=dict.fromkeys(sizes, ("read", "shapes")))
    file = tmp_path / "a-b.csv"
    assert keep.recompute(one, tmp_path, "1111111") == []  # nothing is on file yet
    for size in sizes:
        rows(one, size, tmp_path)
    assert keep.recompute(one, tmp_path, "1111111") == []
    for change in ({"value": 2.0000001}, {"commit": "new1234"}):
        source |= change
        assert list(keep.outdated(one, "kept", keep.read(file), tmp_path)) == ["read"]
        assert keep.recompute(one, tmp_path, "1111111") == ["kept, read"]
    on_file = {(row["size"], row["quantity"]): (row["ours"], row["commit"]) for row in keep.read(file)}
    assert on_file == {
        ("toy", "speed"): ("1", "old1234"),
        ("toy", "size"): ("3", "abc1234"),
        ("kept", "speed"): ("2.0000001", "new1234"),
        ("kept", "size"): ("3", "abc1234"),
    }
    fewer = dataclasses.replace(one, pieces=dict.fromkeys(sizes, ("read",)))
    assert keep.outdated(fewer, "kept", keep.read(file), tmp_path) == {"shapes": []}
    assert keep.recompute(fewer, tmp_path, "1111111") == ["kept, shapes"]
    assert [(row["size"], row["piece"]) for row in keep.read(file)] == [("toy", "read"), ("toy", "shapes"), ("kept", "read")]
