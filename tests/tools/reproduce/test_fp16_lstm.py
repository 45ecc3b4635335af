"""The slides' language model: what is counted, by hand, and the whole command at its smallest size."""

import csv

import pytest
import torch

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
