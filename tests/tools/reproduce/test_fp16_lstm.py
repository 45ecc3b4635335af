"""The slides' language model: what is counted, by hand, and its cases at the smallest size."""

import pytest
import torch

from tools.reproduce import fp16_lstm


def test_gradients_are_counted_by_hand():
    shape = fp16_lstm.SIZES["tiny"]
    counted = fp16_lstm.Gradients(fp16_lstm.Model(shape))
    g = torch.tensor([0.0, 2.0**-25, -(2.0**-26), 2.0**-31, 2.0**-32, 1.0])
    counted.count(g)
    assert counted.elements == 0
    counted.counting = True
    counted.count(g)
    assert (counted.elements, counted.zeros) == (6, 1)
    assert counted.below == {1.0: 4, 8.0: 2, 128.0: 1}  # 2^-31 times 128 is 2^-24, which FP16 has


def test_fp16_with_masters_follows_fp32_and_a_scale_leaves_no_more_zeros_than_none():
    text = torch.frombuffer(bytearray(b"The quick brown fox jumps over the lazy dog. " * 40), dtype=torch.uint8)
    found = list(fp16_lstm.table("tiny", text))
    assert [(row["level"], row["loss_scale"]) for row in found] == list(fp16_lstm.CASES)
    assert ["below_at_1" in row for row in found] == [True, False, False, False, False]
    assert all(float(row["loss"]) == pytest.approx(float(found[0]["loss"]), rel=0.02) for row in found)
    zeros = [float(row["zeros"]) for row in found]
    assert zeros[0] <= zeros[3] <= zeros[2] <= zeros[1]
