"""The slides' claims about FP16: boxes and their loss by hand, and the claims themselves."""

import pytest
import torch

from tools.reproduce import fp16_amp
from tools.reproduce import fp16_classifier as small


def perfect(boxes):
    """What a detector would say that knows the boxes."""
    default = fp16_amp.default_boxes()
    found = torch.zeros(len(boxes), len(default), 7)
    found[..., 0] = 20.0
    for image, both in enumerate(boxes):
        for kind, box in enumerate(both):
            for i in range(len(default)):
                share = fp16_amp.overlap(default[i], box)
                if share >= 0.5 and share == fp16_amp.overlap(default[i], both).max():
                    found[image, i, [0, kind + 1]] = torch.tensor([0.0, 20.0])
                    centre, size = (box[:2] - default[i, :2]) / default[i, 2:] * 10, (box[2:] / default[i, 2:]).log() * 5
                    found[image, i, 3:] = torch.cat([centre, size])
    return found


def test_a_perfect_detector_has_no_loss_and_finds_all():
    boxes = fp16_amp.scenes(40, 1).boxes
    good = [i for i, both in enumerate(boxes) if (fp16_amp.overlap(fp16_amp.default_boxes()[:, None], both).amax(0) >= 0.5).all()][:4]
    boxes = boxes[good]
    assert fp16_amp.average_precision(perfect(boxes), boxes) == pytest.approx(1.0)
    assert fp16_amp.loss_of(perfect(boxes), boxes) < 1e-4
    assert fp16_amp.average_precision(torch.zeros(len(boxes), 256, 7), boxes) < 0.5


def test_losses_are_without_the_factor_which_alone_leaves_the_gradient_zero(monkeypatch):
    monkeypatch.setattr(fp16_amp, "CASES", fp16_amp.CASES[1:5:3])
    whole, shrunk = fp16_amp.detection(1)
    assert [(row["factor"], row["loss_scale"]) for row in (whole, shrunk)] == [("1", 1.0), ("2^-9", 1.0)]
    assert whole["loss"] == shrunk["loss"]
    assert float(whole["zeros"]) < 0.6 < 0.9 < float(shrunk["zeros"])


@pytest.mark.nightly
@pytest.mark.timeout(900)  # FP16 is slow where a CPU has no such instructions
def test_the_detector_needs_loss_scaling_where_its_gradients_are_small():
    fp32, whole, *_, without, constant, dynamic = fp16_amp.detection(300)
    assert float(whole["average_precision"]) > float(fp32["average_precision"]) - 0.08
    assert float(without["zeros"]) > 0.9
    # 0.000 on a CPU with FP16 arithmetic, 0.152 on one that computes in FP32 and rounds: what it learns, its largest gradients teach it.
    assert float(without["average_precision"]) < 0.5 * float(fp32["average_precision"])
    assert float(without["loss"]) > 5 * float(fp32["loss"])
    for row in (constant, dynamic):
        assert float(row["average_precision"]) > float(fp32["average_precision"]) - 0.08
        assert float(row["loss"]) < 1.2 * float(fp32["loss"])


# The classifier of the slides' Table 1: its images by hand, and that it learns in either precision.


def test_it_learns_in_fp32_and_in_mixed_precision(monkeypatch):
    monkeypatch.setattr(small, "HELD_OUT", 300)
    chance = 100 / len(small.SHAPES)
    for level in ("O0", "O2"):
        assert small.accuracy(level, 1, 60, 32) > chance + 8
