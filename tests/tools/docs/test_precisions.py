"""The pages of the precisions: from recipes, shapes and rows."""

import pytest

from msamp.numerics import recipe
from tools.docs import precisions, shapes


def test_the_bytes_are_those_of_the_table() -> None:
    held = precisions.bytes_by_state()
    assert held["O2"] == {"weight": 2.0, "gradient": 1.0, "master": 0.0, "m": 1.0, "v": 2.0}
    for cells in shapes.bytes_per_parameter().cells:
        assert sum(held[cells[0].strip("`")].values()) == pytest.approx(float(cells[-1]))


@pytest.mark.parametrize("one", precisions.ALL, ids=lambda one: one.name)
def test_a_page_has_words_bytes_and_measurements(one: precisions.Page) -> None:
    text = precisions.page(one)
    assert recipe.by_name(one.recipe).name in recipe.names()
    assert f"../../results/figures/precision-{one.name}.png" in text
    assert f"precision-{one.name}" in precisions.FIGURES
    assert f"`--precision {recipe.by_name(one.recipe).name}`" in text
    assert ("msamp.initialize(" in text) == (one.recipe != "fp16-amp")
    assert "validation loss" in text
    assert len(precisions.losses(one).cells) == (1 if one.recipe == "O0" else 2)
    assert ("Measured with nearest rounding" in " ".join(text.split())) == (one.recipe == "O1")
    assert f"({one.name}.md)" in precisions.overview()


def test_the_fastest_step_is_taken_beside_that_of_bf16() -> None:
    (page,) = (one for one in precisions.ALL if one.recipe == "O3")
    base, fastest = precisions.steps(page)
    assert (base["case"], fastest["case"]) == ("O0", "O3")
    assert float(fastest["ms"]) < float(base["ms"])
