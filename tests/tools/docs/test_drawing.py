"""How figures are drawn: every axis has a label, and compared panels have one scale."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tools import tables
from tools.docs import drawing

PHONE, LEGIBLE = 358, 8.9  # pixels: what a page 390 wide has for a picture, and the height of its letters


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, kept before they are saved."""
    pytest.importorskip("matplotlib")
    made, axes_of = [], drawing.axes_of

    def kept(*args: Any, **options: Any) -> tuple[Any, Any]:
        figure, axes = axes_of(*args, **options)
        made.append(figure)
        return figure, axes

    monkeypatch.setattr(drawing, "axes_of", kept)
    return made


@pytest.mark.parametrize("name", sorted(tables.figures()))
def test_every_axis_has_a_label_and_nothing_is_cut(name: str, drawn: list[Any], tmp_path: Path) -> None:
    figure = tables.figures()[name]()
    figure.draw(figure.numbers, tmp_path / "figure.png")
    (canvas,) = drawn
    width, height = canvas.canvas.get_width_height()
    assert width == 900  # pixels; a page of the documentation shows about 700
    for row in canvas.axes:
        below = [axis for axis in canvas.axes if axis is row or axis.get_shared_x_axes().joined(row, axis)]
        beside = [axis for axis in canvas.axes if axis is row or axis.get_shared_y_axes().joined(row, axis)]
        assert any(axis.get_xlabel() for axis in below)
        assert any(axis.get_ylabel() or any(label.get_text() for label in axis.get_yticklabels()) for axis in beside)
        legend = row.get_legend()
        for part in (row.xaxis.label, row.yaxis.label, row.title, row._left_title, *([legend] if legend is not None else [])):
            box = part.get_window_extent()
            if box.width:
                assert box.x0 >= -1, part
                assert box.x1 <= width + 1, part
                assert box.y0 >= -1, part
                assert box.y1 <= height + 1, part
        left, right = row.get_xlim()
        ticks = [label for label in row.get_xticklabels() if label.get_text() and left <= label.get_position()[0] <= right]
        boxes = sorted((label.get_window_extent() for label in ticks if label.get_visible()), key=lambda box: box.x0)
        assert all(one.x1 <= other.x0 for one, other in itertools.pairwise(boxes)), "names of ticks overlap"
        letters = [*ticks, *row.get_yticklabels(), row.xaxis.label, *(legend.get_texts() if legend is not None else [])]
        smallest = min(label.get_fontsize() for label in letters) * canvas.dpi / 72
        assert smallest * PHONE / width >= LEGIBLE


def test_a_long_name_is_in_two_lines_where_it_says_how_it_ran() -> None:
    assert drawing.in_lines("a rather long name, in graphs") == "a rather long name,\nin graphs"
    assert [drawing.in_lines(name) for name in ("O2, in graphs", "a rather long name alone")] == [
        "O2, in graphs",
        "a rather long name alone",
    ]


def test_panels_have_one_scale(drawn: list[Any], tmp_path: Path) -> None:
    panels = {"a": {"x": [[0, 10, 20], [9.0, 2.0, 1.0]]}, "b": {"x": [[0, 10, 20], [90.0, 3.0, 2.0]]}}
    drawing.draw_panels({"panels": panels, "x": "step", "y": "loss", "log": ""}, tmp_path / "figure.png")
    (limits,) = {axes.get_ylim() for axes in drawn[0].axes}
    assert limits == pytest.approx((0.9, 3.1))
    several = {"GPT-125M": {"bf16": {"gpus": [8, 16], "ms": [200, 100], "gib": [20, 10]}, "O3": {"gpus": [8], "ms": [100], "gib": [9]}}}
    drawing.draw_scaling(several | {"GPT-7B": several["GPT-125M"]}, tmp_path / "figure.png")
    assert len({(axes.get_ylim(), axes.get_xlim()) for axes in drawn[1].axes}) == 2  # one for times, one for memory


def test_a_logarithmic_axis_names_its_places(drawn: list[Any], tmp_path: Path) -> None:
    drawing.draw_panels({"panels": {"": {"x": [[2, 4, 8], [1.0, 10.0, 100.0]]}}, "x": "ranks", "y": "dB", "log": "xy"}, tmp_path / "f.png")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "8"]
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_legend()) == ("log", "log", None)
