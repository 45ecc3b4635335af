"""The slides' entries that take seconds."""

from pathlib import Path

import pytest
import torch

from helpers.refusals import code
from tools.reproduce import __main__ as reproduce
from tools.reproduce import keep, slides
from tools.reproduce.entry import ENTRIES, Task

TASK = Task("toy", "whole", Path("text"), Path("folder"))


def test_values_below_the_smallest_are_counted_among_those_that_are_not_zero(tmp_path):
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    found = {finding.quantity: finding.ours for finding in slides.small_updates(Task("toy", "whole", tmp_path / "text", tmp_path))}
    for model in ("LSTM", "GPT"):
        gradients, updates = (
            found[f"{model}: {what}weight gradient{end}"] for what, end in (("", "s below 2^-24"), ("learning rate x ", " below 2^-24"))
        )
        assert 0 <= gradients < updates < 100


# `python -m tools.reproduce`: the list, a toy, and what it refuses.


def test_the_list_has_no_row_without_a_result_or_a_reason(tmp_path, capsys):
    assert reproduce.main(["--list", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[::3]] == list(ENTRIES)
    assert len(lines) == 3 * len(ENTRIES)
    for (name, one), sizes, state in zip(ENTRIES.items(), lines[1::3], lines[2::3], strict=True):
        assert "results: toy: 0 of " in state or " 0 of" in state, name
        assert all(f"{size} ({needs})" in sizes for size, needs in one.sizes.items())


def test_a_toy_is_kept_told_and_listed(tmp_path, capsys):
    assert reproduce.main(["collage-table1", "--size", "toy", "--out", str(tmp_path), "--commit", "abc1234"]) == 0
    told = capsys.readouterr().out
    assert "| beta2 0.99, first component | 0.9883 | 0.9893 |" in told
    assert (tmp_path / "collage-table1.csv").is_file()
    assert reproduce.main(["--list", "--out", str(tmp_path)]) == 0
    assert "toy: 1 of 1 pieces" in capsys.readouterr().out


def test_a_command_that_a_page_prints_compares_what_is_stored_and_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(keep, "run", lambda *given: pytest.fail("it runs"))
    for name, one in ENTRIES.items():
        size, rows = keep.largest(one, keep.read(reproduce.ROOT / keep.RESULTS / f"{name}.csv"))
        if size:
            assert reproduce.main(rows[0]["command"].split()[3:]) == 0
            told = capsys.readouterr().out
            again = f"python -m tools.reproduce {name} --size {size}`, with"
            assert again in " ".join(told.split()), name


def test_the_list_says_when_results_were_measured_and_how_far_losses_are_apart(tmp_path):
    empty = dict.fromkeys(keep.COLUMNS, "") | {"size": "kept", "piece": "whole", "gpu": "NVIDIA H200"}
    losses = {(run, seed): loss + 0.01 * seed for run, loss in (("bf16", 5.0), ("O3", 5.01)) for seed in (1, 2)}
    rows = [
        empty | {"quantity": f"{run} at 125M: validation loss", "ours": str(loss), "seed": str(seed), "date": f"2026-11-2{seed}"}
        for (run, seed), loss in losses.items()
    ]
    keep.write(tmp_path / "fp8lm-figure4.csv", rows)
    lines = "\n".join(reproduce.listing(tmp_path))
    assert "kept: holds; H200, 2026-11-21 to 2026-11-22" in lines
    assert "O3 at 125M against bf16 at 125M: +0.0100 nats per token, +0.20 % (95 % interval" in lines


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give the NAME of an entry, or --list"),
        (["fp8lm-table1", "--list"], "give the NAME of an entry, or --list"),
        (["fp8lm-table11"], "'fp8lm-table11' is not an entry: choose one of fp8lm-figure1"),
        (["fp8lm-table1", "--size", "huge"], "--size huge: fp8lm-table1 has toy"),
        (["slides-tensor-cores"], "slides-tensor-cores needs 1 GPU(s); this machine has 0: run it there"),
        (["slides-lstm", "--size", "full"], "--size full of slides-lstm needs 1 GPU(s); this machine has 0"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(arguments, told, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert code(reproduce.main, [*arguments, "--out", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
