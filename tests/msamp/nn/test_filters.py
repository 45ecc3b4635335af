import pytest
from torch import nn

from msamp.nn.filters import DEFAULT, all_of, exclude_names, include_names, min_features


def accepted(accept, name="blocks.0.fc1", sizes=(32, 32)) -> bool:
    return accept(name, nn.Linear(*sizes, device="meta"))


def test_names_are_searched_as_regular_expressions():
    accept = exclude_names(r"fc2$", r"^head")
    assert [accepted(accept, n) for n in ("blocks.0.fc1", "blocks.0.fc2", "head", "blocks.head")] == [True, False, False, True]


@pytest.mark.parametrize(("sizes", "want"), [((64, 64), True), ((63, 64), False), ((64, 63), False), ((1000, 10), False)])
def test_narrow_layers_are_refused(sizes, want):
    assert accepted(min_features(64), sizes=sizes) is want


def test_all_of_wants_every_filter():
    accept = all_of(include_names("fc"), min_features(16))
    assert accepted(accept)
    assert not accepted(accept, name="qkv")
    assert not accepted(accept, sizes=(8, 32))
    assert accepted(all_of())


@pytest.mark.parametrize("name", ["lm_head", "output_layer", "model.lm_head", "gpt_neox.embed_out"])
def test_by_default_the_lm_head_stays(name):
    assert not accepted(DEFAULT, name)
