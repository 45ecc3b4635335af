"""The slides' entries that take seconds."""

from pathlib import Path

import pytest

from tools.reproduce import slides
from tools.reproduce.entry import Task

TASK = Task("toy", "whole", Path("text"), Path("folder"))


def test_fp16_has_the_intervals_of_the_table_and_rounds_to_nearest():
    found = {finding.quantity: finding.ours for finding in slides.numbers(TASK)}
    assert sum(": interval" in quantity for quantity in found) == 30
    assert found["from 0 to 2^-13: interval"] == 2**-24
    assert found["intervals that differ"] == 0
    assert found["smallest whole number that becomes infinity"] == 65520
    assert found["0.75 x 2^-24 becomes"] == 2**-24


def test_an_fp16_weight_loses_small_updates_and_a_copy_does_not():
    found = {finding.quantity: finding for finding in slides.weight_copies(TASK)}
    assert found["update of 2^-12 of the weight, FP16 alone: share that arrives"].ours == 0
    assert found["update of 2^-12 of the weight, FP32 copy: share that arrives"].ours == 1
    assert len(found) == 10


def test_accuracies_are_compared_by_seed(monkeypatch):
    accuracies = {("O0", 1): 80.0, ("O2", 1): 81.0, ("O0", 2): 70.0, ("O2", 2): 70.5}
    monkeypatch.setattr(slides.fp16_classifier, "accuracy", lambda level, seed, steps, width: accuracies[level, seed])
    found = {(finding.quantity, finding.seed): finding for finding in slides.classification(TASK)}
    mean = found["mixed precision less FP32, mean", None]
    assert (mean.ours, mean.paper) == (0.75, pytest.approx((0.16 + 0.03 + 0.10 - 0.01 + 0.28 + 0.12) / 6))
    assert found["half width of its 95 % interval", None].ours == pytest.approx(12.7062 * 0.25)
    assert found["FP32: accuracy", 2].ours == 70.0


def test_values_below_the_smallest_are_counted_among_those_that_are_not_zero(tmp_path):
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    found = {finding.quantity: finding.ours for finding in slides.small_updates(Task("toy", "whole", tmp_path / "text", tmp_path))}
    for model in ("LSTM", "GPT"):
        gradients, updates = (
            found[f"{model}: {what}weight gradient{end}"] for what, end in (("", "s below 2^-24"), ("learning rate x ", " below 2^-24"))
        )
        assert 0 <= gradients < updates < 100


def test_the_language_model_has_a_row_for_each_loss_scale(tmp_path):
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    found = {finding.quantity for finding in slides.language_model(Task("toy", "whole", tmp_path / "text", tmp_path))}
    assert {f"FP16, loss scale {scale}: validation loss" for scale in ("1.0", "8.0", "128.0", "dynamic")} <= found
    assert "activation gradients below 2^-24, loss scale 128" in found
