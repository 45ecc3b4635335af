"""The list of tables and figures, and each that has a toy size run as CI runs it."""

import math

import pytest

from tools.bench.rows import ROOT
from tools.reproduce import keep
from tools.reproduce.entry import Task
from tools.reproduce.registry import ENTRIES

IN_PART = ("collage-table5-right", "collage-table6")
TOYS = [name for name, one in ENTRIES.items() if "toy" in one.sizes]


def test_every_table_and_figure_of_the_papers_is_named():
    """Figures 2 and 3 of FP8-LM and 1 of Collage are drawings."""
    titles = " ".join(one.title for one in ENTRIES.values())
    for paper, tables, figures in (("FP8-LM", range(1, 11), (1, 4, 5, 6, 7, 8, 9)), ("Collage", range(1, 9), (2, 3, 4))):
        mine = " and ".join(
            one.title.replace("Figures 2 and 3", "Figure 2 and Figure 3") for one in ENTRIES.values() if one.title.startswith(paper)
        )
        assert not [number for number in tables if f"Table {number} " not in f"{mine} ".replace(" and", " and ")]
        assert not [number for number in figures if f"Figure {number} " not in f"{mine} "]
    assert "COAT" in titles
    assert "Slides" in titles


def test_every_entry_has_a_claim_and_a_headline():
    for name, one in ENTRIES.items():
        assert one.name == name
        assert one.claim.endswith(".")
        assert one.headline


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
        assert {(size, piece) for size, piece in pieces if size not in one.sizes or piece not in one.pieces(size)} == set(), name


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly(60)] if ENTRIES[name].slow else []) for name in TOYS])
def test_a_toy_runs_on_a_cpu(name, tmp_path):
    """Of a table of many pieces the first and the last; all of them by night."""
    pieces = list(ENTRIES[name].pieces("toy"))
    check_toy(name, [pieces[0], pieces[-1]] if name in IN_PART else pieces, tmp_path)


@pytest.mark.nightly(10)
@pytest.mark.parametrize("name", IN_PART)
def test_every_piece_of_a_toy_runs_on_a_cpu(name, tmp_path):
    check_toy(name, ENTRIES[name].pieces("toy"), tmp_path)


def check_toy(name, pieces, tmp_path):
    one = ENTRIES[name]
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. Wer nicht wagt, der nicht gewinnt.\n" * 120)
    found = [finding for piece in pieces for finding in one.run(Task("toy", piece, text, tmp_path / "kept"))]
    lines = [finding for finding in found if finding.x is None]
    assert one.headline in {finding.quantity for finding in lines}
    keys = [(finding.quantity, finding.seed, finding.x) for finding in found]
    assert len(set(keys)) == len(keys)
    assert all(not isinstance(finding.ours, float) or math.isfinite(finding.ours) for finding in found)
