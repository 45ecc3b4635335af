"""The classifier of the slides' Table 1: its images by hand, and that it learns in either precision."""

import pytest
import torch

from tools.reproduce import fp16_classifier as small


def test_images_are_the_same_for_the_same_seed_and_hold_every_shape(monkeypatch):
    images, kinds = small.drawings(200, 3)
    again, _ = small.drawings(200, 3)
    assert torch.equal(images, again)
    assert not torch.equal(images, small.drawings(200, 4)[0])
    assert images.shape == (200, 1, small.IMAGE, small.IMAGE)
    assert set(kinds.tolist()) == set(range(len(small.SHAPES)))
    monkeypatch.setattr(small, "NOISE", 0.0)
    clean, kinds = small.drawings(400, 5)
    assert set(clean.unique().tolist()) == {0.0, 1.0}
    area = {name: float(clean[kinds == kind].sum((1, 2, 3)).mean()) for kind, name in enumerate(small.SHAPES)}
    radius2 = sum((4 + 3 * x / 1000) ** 2 for x in range(1000)) / 1000  # mean of the squared radius
    assert area["square"] == pytest.approx(4 * 0.81 * radius2, rel=0.15)
    assert area["disc"] == pytest.approx(3.1416 * radius2, rel=0.15)
    assert area["ring"] < area["disc"]


def test_it_learns_in_fp32_and_in_mixed_precision():
    chance = 100 / len(small.SHAPES)
    for level in ("O0", "O2"):
        assert small.accuracy(level, 1, 60, 32) > chance + 8
