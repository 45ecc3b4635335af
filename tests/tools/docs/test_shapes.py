"""Tables from shapes and formats, against sums by hand and against the README."""

import pytest

from tools.docs import shapes
from tools.docs.evidence import ROOT

BY_HAND = {"O0": 18, "O1": 11, "O2": 6, "O3": 7, "`coat`": 9.125, "`collage-light`": 10, "`collage-plus`": 12, "`fp16-amp`": 18}


def test_bytes_of_a_parameter_are_those_by_hand_and_their_parts_add_up():
    cells = shapes.bytes_per_parameter().cells
    assert {line[0]: float(line[-1]) for line in cells} == BY_HAND
    for line in cells:
        parts = (part for cell in line[1:-1] for part in cell.removesuffix(", its own master").split(" + "))
        assert sum(map(float, parts)) == float(line[-1])
    assert [line[0] for line in cells if "own master" in line[1]] == ["O1", "O2"]


def test_the_readme_has_the_same_bytes():
    lines = [
        line.strip("| ").split(" | ") for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]
    levels = [(line[0].strip("[").split("]")[0].split(", ")[0], line[-1]) for line in lines if len(line) == 7]  # the text of the link
    told = {level: shown.replace(" 1/8", ".125") for level, shown in levels}
    assert {name: float(told[name]) for name in BY_HAND if name in told} == {name: BY_HAND[name] for name in BY_HAND if name in told}
    assert len(set(told) & set(BY_HAND)) >= 7


def test_the_listing_and_the_table_of_7b_agree():
    fullest = shapes.dry_run_7b().lines[-1].split()
    o3 = next(cells for cells in shapes.memory_7b().cells if cells[0] == "O3")
    assert fullest[-8:] == list(o3[1:])


def test_a_refusal_that_no_longer_comes_is_an_error(monkeypatch):
    assert shapes.refused_7b().lines[0].startswith("error: pipeline stage 0 needs 128.8 GiB")
    monkeypatch.setattr(shapes, "MEMORY", 2 * shapes.MEMORY)
    with pytest.raises(ValueError, match="7B at O0 fits into an H100"):
        shapes.refused_7b()
