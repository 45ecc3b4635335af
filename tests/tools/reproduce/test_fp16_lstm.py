"""The slides' language model: what is counted, by hand, and the whole command at its smallest size."""

import csv

import pytest
import torch

from helpers.refusals import code
from tools.reproduce import fp16_lstm

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


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


def test_gradients_of_all_three_activations_are_seen():
    shape = fp16_lstm.SIZES["tiny"]
    model = fp16_lstm.Model(shape)
    counted = fp16_lstm.Gradients(model)
    counted.counting = True
    fp16_lstm.loss_of(model, torch.zeros(2, 5, dtype=torch.long)).backward()
    assert counted.elements == 2 * 4 * (16 + 16 + 256)


def test_the_same_batches_for_every_case_and_the_last_bytes_are_held_out():
    text, shape = torch.arange(200, dtype=torch.uint8), fp16_lstm.SIZES["tiny"]
    first, again = ([*fp16_lstm.windows(text, shape, 3)] for _ in range(2))
    assert torch.stack(first).equal(torch.stack(again))
    assert not first[0].equal(first[1])
    assert all((window[:, 1:] == window[:, :-1] + 1).all() and window.shape == (4, 9) for window in first)


def test_the_command(tmp_path, capsys):
    text, table = tmp_path / "text", tmp_path / "new" / "rows.csv"
    text.write_text(TEXT)
    assert fp16_lstm.main(["--text", str(text), "--size", "tiny", "--csv", str(table)]) == 0
    with table.open(newline="") as stream:
        found = list(csv.DictReader(stream))
    assert [(row["level"], row["loss_scale"]) for row in found] == [(level, str(scale)) for level, scale in fp16_lstm.CASES]
    assert [row["below_at_1"] != "" for row in found] == [True, False, False, False, False]
    # FP16 with masters follows FP32, and a scale leaves no more zeros than none.
    assert all(float(row["loss"]) == pytest.approx(float(found[0]["loss"]), rel=0.02) for row in found)
    zeros = [float(row["zeros"]) for row in found]
    assert zeros[0] <= zeros[3] <= zeros[2] <= zeros[1]
    assert capsys.readouterr().out.count("LSTM language model") == 5


def test_a_text_that_is_too_short_is_refused(tmp_path, capsys):
    (tmp_path / "text").write_text("too short")
    assert code(fp16_lstm.main, ["--text", str(tmp_path / "text"), "--size", "tiny"]) == 2
    assert "the text has 9 bytes, too few for sequences of 8 (size tiny): give 200 or more" in capsys.readouterr().err
