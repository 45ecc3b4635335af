"""Shares of small updates: the formula, and one case of each rounding."""

import csv

import pytest
import torch

from tools.reproduce import small_updates


def test_the_share_is_one_for_all_zero_for_none_and_negative_against_the_direction():
    wanted = torch.tensor([2.0, -1.0, 1.0])
    shares = [small_updates.share(moved, wanted) for moved in (wanted, 0 * wanted, -wanted, torch.tensor([2.0, 0.0, 0.0]))]
    assert shares == [1, 0, -1, 0.5]


def test_nearest_rounding_loses_most_of_a_small_update_and_stochastic_rounding_delivers_it():
    wanted = small_updates.displacement(0.05, 5e-6)
    nearest, stochastic = (
        small_updates.share(small_updates.displacement(0.05, 5e-6, "O2", rounding), wanted) for rounding in small_updates.ROUNDINGS
    )
    assert nearest < 0.3
    assert stochastic > 0.93


def test_rows_have_a_case_each_and_their_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(small_updates, "CASES", ((0.02, 1e-4),))
    monkeypatch.setattr(small_updates, "STEPS", 2)
    file = tmp_path / "small_updates.csv"
    assert small_updates.main(["--csv", str(file), "--commit", "0123456"]) == 0
    with file.open(newline="", encoding="utf-8") as stream:
        found = list(csv.DictReader(stream))
    assert [(row["recipe"], row["rounding"]) for row in found] == [
        (recipe, rounding) for recipe in small_updates.RECIPES for rounding in small_updates.ROUNDINGS
    ]
    assert all(row["commit"] == "0123456" and row["command"].endswith("--csv small_updates.csv") for row in found)
    assert "std 0.02, lr 0.0001, O1 nearest: " in capsys.readouterr().out


def test_a_file_is_required():
    with pytest.raises(SystemExit):
        small_updates.main([])
