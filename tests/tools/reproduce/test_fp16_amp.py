"""The slides' claims about FP16: boxes and their loss by hand, and the claims themselves."""

import csv
import itertools

import pytest
import torch

from helpers.refusals import code
from tools.reproduce import fp16_amp


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


def test_overlaps_by_hand():
    box = torch.tensor([0.5, 0.5, 0.2, 0.2])
    for other, share in (([0.5, 0.5, 0.2, 0.2], 1.0), ([0.6, 0.5, 0.2, 0.2], 1 / 3), ([0.8, 0.5, 0.2, 0.2], 0.0)):
        assert float(fp16_amp.overlap(box, torch.tensor(other))) == pytest.approx(share, abs=1e-6)


def test_objects_are_where_their_boxes_say():
    images, boxes = fp16_amp.scenes(4, 0)
    for image, both in zip(images, boxes, strict=True):
        for x, y in (both[:, :2] * fp16_amp.IMAGE).int().tolist():
            assert image[0, y, x] > 0.2
    assert fp16_amp.default_boxes().shape == (256, 4)


def test_a_perfect_detector_has_no_loss_and_finds_all():
    boxes = fp16_amp.scenes(40, 1).boxes
    good = [i for i, both in enumerate(boxes) if (fp16_amp.overlap(fp16_amp.default_boxes()[:, None], both).amax(0) >= 0.5).all()][:4]
    boxes = boxes[good]
    assert fp16_amp.average_precision(perfect(boxes), boxes) == pytest.approx(1.0)
    assert fp16_amp.loss_of(perfect(boxes), boxes) < 1e-4
    assert fp16_amp.average_precision(torch.zeros(len(boxes), 256, 7), boxes) < 0.5


def test_an_fp16_weight_takes_no_update_below_2_to_the_minus_11():
    found = {(row["level"], row["update_over_value"]): float(row["arrived"]) for row in fp16_amp.weight_copies()}
    assert len(found) == 10
    for (level, name), share in found.items():
        assert share == (1.0 if level == "O2" or fp16_amp.RATIOS[name] > 2.0**-11 else 0.0)  # 2^-11 of 1 is a tie, and goes to even


@pytest.mark.nightly
def test_it_recovers_from_an_overflow():
    rows = list(fp16_amp.overflow())
    scales, losses = [2.0 ** float(row["loss_scale"][2:]) for row in rows], [float(row["loss"]) for row in rows]
    falling = scales.index(min(scales))
    assert falling > 3
    assert all(after == before / 2 for before, after in itertools.pairwise(scales[: falling + 1]))
    assert scales[-1] > scales[falling]
    assert losses[-1] < 0.5 * losses[0]


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fp16_amp, "CASES", fp16_amp.CASES[1:5:3])
    monkeypatch.setattr(fp16_amp, "TRACED", 2)
    table = tmp_path / "table.csv"
    assert fp16_amp.main(["--steps", "1", "--csv", str(table)]) == 0
    with table.open(newline="") as stream:
        found = list(csv.DictReader(stream))
    assert [row["what"] for row in found].count("overflow") == 2
    whole, shrunk = found[:2]
    assert [(row["factor"], row["loss_scale"]) for row in (whole, shrunk)] == [("1", "1.0"), ("2^-9", "1.0")]
    assert whole["loss"] == shrunk["loss"]  # told without the factor
    assert float(whole["zeros"]) < 0.6 < 0.9 < float(shrunk["zeros"])  # the factor, not FP16 alone, leaves the gradient zero
    assert capsys.readouterr().out.count("detection") == 2
    assert code(fp16_amp.main, ["--steps", "0"]) == 2
    assert "argument --steps: 0 is out of range: give 1" in capsys.readouterr().err


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
