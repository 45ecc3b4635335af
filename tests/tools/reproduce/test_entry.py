"""Entries: what they need, which size a machine takes, and each that has a toy size run as CI runs it."""

import math

import pytest
import torch

from tools.bench.rows import ROOT
from tools.reproduce import keep
from tools.reproduce.entry import ENTRIES, Entry, Finding, Needs, Task

IN_PART = ("collage-table5-right", "collage-table6")
TOYS = [name for name, one in ENTRIES.items() if "toy" in one.sizes]


COMPUTED = [(name, size) for name, one in ENTRIES.items() for size, needs in one.sizes.items() if needs.computed]


@pytest.mark.promise("Tools", "Every reproduced number that is computed from recorded results or shapes is what its sources say today.")
@pytest.mark.parametrize(("name", "size"), COMPUTED)
def test_computed_results_on_file_are_what_their_sources_say(name, size, tmp_path):
    rows = [row for row in keep.read(ROOT / keep.RESULTS / f"{name}.csv") if row["size"] == size]
    changed = keep.outdated(ENTRIES[name], size, rows, tmp_path, "0000000") if rows else {}
    told = {piece: [(row["quantity"], row["ours"]) for row in fresh if row not in rows][:3] for piece, fresh in changed.items()}
    assert not told, f"{name}, size {size}: run `python -m tools.reproduce --recompute` and `make tables`"


def test_every_kept_size_is_computed_and_none_that_trains_on_a_text_or_needs_a_gpu():
    sizes = {(name, size): needs for name, one in ENTRIES.items() for size, needs in one.sizes.items()}
    assert {pair for pair in sizes if pair[1] == "kept"} <= set(COMPUTED)
    assert not [pair for pair in COMPUTED if sizes[pair].gpus or sizes[pair].text or pair[1] in ("small", "full")]


def test_every_row_on_file_is_of_a_piece_that_its_entry_has():
    for name, one in ENTRIES.items():
        file = ROOT / keep.RESULTS / f"{name}.csv"
        pieces = {(row["size"], row["piece"]) for row in (keep.read(file) if file.exists() else [])}
        assert {(size, piece) for size, piece in pieces if size not in one.sizes or piece not in one.pieces_of(size)} == set(), name


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly(60)] if ENTRIES[name].slow else []) for name in TOYS])
def test_a_toy_runs_on_a_cpu(name, tmp_path):
    """Of a table of many pieces the first and the last; all of them by night."""
    pieces = list(ENTRIES[name].pieces_of("toy"))
    check_toy(name, [pieces[0], pieces[-1]] if name in IN_PART else pieces, tmp_path)


@pytest.mark.nightly(10)
@pytest.mark.parametrize("name", IN_PART)
def test_every_piece_of_a_toy_runs_on_a_cpu(name, tmp_path):
    check_toy(name, ENTRIES[name].pieces_of("toy"), tmp_path)


def check_toy(name, pieces, tmp_path):
    one = ENTRIES[name]
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. Wer nicht wagt, der nicht gewinnt.\n" * 120)
    found = [finding for piece in pieces for finding in one.findings(Task("toy", piece, text, tmp_path / "kept"))]
    lines = [finding for finding in found if finding.x is None]
    assert one.headline in {finding.quantity for finding in lines}
    keys = [(finding.quantity, finding.seed, finding.x) for finding in found]
    assert len(set(keys)) == len(keys)
    assert all(not isinstance(finding.ours, float) or math.isfinite(finding.ours) for finding in found)


def found(task):
    return [Finding("a", 1.0)]


def made(**changes):
    return Entry(**({"name": "a-b", "title": "A, B", "claim": "C.", "run": found} | changes))


def test_an_entry_without_a_size_is_refused():
    with pytest.raises(ValueError, match="size"):
        made(sizes={})


def test_the_largest_size_is_the_last_that_the_machine_has_all_for(monkeypatch, tmp_path):
    sizes = {"toy": Needs(), "small": Needs(minutes=3, files=("setup.py",)), "full": Needs(gpus=1, gib=80)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert made(run=found, sizes=sizes).largest() == "small"
    assert sizes["small"].lacking(tmp_path).startswith("setup.py (docs/results/commands.md")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for gib, size in ((79.2, "full"), (40.0, "small")):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gib=gib: type("Card", (), {"total_memory": gib * 2**30})())
        assert made(run=found, sizes=sizes).largest() == size


def test_what_cannot_be_run_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="GPU"):
        made(run=found, sizes={"full": Needs(gpus=2)}).largest()
