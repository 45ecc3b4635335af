"""The page of `msamp watch`: complete, reloading while a run goes on, and valid as XML where it draws."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from helpers import watched
from megatron.lm.tools.watch.page import chart, page, ticks, write_page
from megatron.lm.tools.watch.run_files import runs_below
from megatron.lm.tools.watch.status import Status

STATES = [Status("running", "running <at> iteration 30"), Status("completed", "completed at iteration 100")]


@pytest.fixture
def runs(tmp_path: Path) -> list:
    watched.folder(tmp_path / "a & b")
    watched.folder(tmp_path / "O0", record_too=False)
    found = sorted(runs_below(tmp_path), key=lambda run: run.name)
    for run in found:
        run.update()
    return found


def test_the_page_has_every_run_and_one_chart_per_quantity(runs: list) -> None:
    text = page(runs, STATES, "08:00:00", 2)
    assert '<meta http-equiv="refresh" content="2">' in text
    assert "Written at 08:00:00; the page reloads every 2 s." in text
    assert "running &lt;at&gt; iteration 30" in text
    assert "<b>a &amp; b</b>" in text
    charts = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert [ET.fromstring(svg).get("aria-label") for svg in charts] == ["nats per token by iteration", "thousand tokens/s by iteration"]
    assert all(svg.count("<polyline") == 2 for svg in charts)
    assert text.count("<td>a.fc1</td>") == 1
    assert ">30.000</td>" in text
    assert "--record-precision FILE" in text  # of the run without one


def test_a_page_that_stays_says_so_and_an_empty_one_is_a_page(runs: list, tmp_path: Path) -> None:
    path = tmp_path / "w.html"
    write_page(path, runs, STATES, "08:00:00", None)
    text = path.read_text(encoding="utf-8")
    assert "refresh" not in text
    assert "the page does not reload any more" in text
    assert "<h2>" not in page([], [], "08:00:00", 2)


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(0.0, 10.0, [0, 2, 4, 6, 8, 10]), (2.1, 2.9, [2.2, 2.4, 2.6, 2.8]), (5.0, 5.0, [5.0]), (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_numbers(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high, 6) == pytest.approx(found)


@pytest.mark.parametrize("points", [[(1.0, 2.0)], [(1.0, 0.0), (1.0, 0.0)], [(0.0, 1.0), (5.0, 1.0)]], ids=["one", "same", "flat"])
def test_a_chart_of_few_points_is_drawn(points: list) -> None:
    drawn = ET.fromstring(chart({"a": points, "b": []}, ["#000000", "#ffffff"], "iteration", "loss"))
    assert "nan" not in ET.tostring(drawn, encoding="unicode")
