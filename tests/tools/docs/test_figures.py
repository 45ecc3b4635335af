"""The published figures: numbers that JSON keeps as they are, and a picture."""

import json

import pytest

from tools.docs.figures import FIGURES


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_numbers_survive_json_and_a_picture_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    figure = FIGURES[name]()
    assert json.loads(json.dumps(figure.numbers)) == figure.numbers
    figure.draw(figure.numbers, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert all(rows for _, rows in figure.sources)
