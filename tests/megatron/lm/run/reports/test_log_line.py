"""The log line: what it shows, in which order it drops fields, and that it never exceeds 120 columns."""

import math
from typing import Any

import pytest

from megatron.lm.run.reports.log_line import duration, evaluation_line, short, train_line
from megatron.lm.shell.terminal import WIDTH, Part

ROW: dict[str, Any] = {
    "iteration": 200,
    "loss": 4.19471,
    "lr": 1.2e-4,
    "grad_norm": 1.8521,
    "skipped": 0,
    "step_ms": 142.81,
    "tokens_per_s": 61_897.0,
    "tflops": 412.6,
    "memory_gib": 14.62,
    "memory_gib_min": 14.6,
    "sent_weight_mib": 0.0,
}


def text(parts: list[Part]) -> str:
    return "  ".join(part.text for part in parts)


def test_a_line_of_one_gpu():
    line = text(train_line(ROW | {"mfu_bf16_peak": 0.417, "mfu_fp8_peak": 0.208}, 95368, 13600.0))
    assert line[2:8:3] == "::"
    assert line[8:] == ("  iter   200/95368  loss 4.1947  lr 1.2e-04  norm 1.85  143 ms  61.9k tok/s  MFU 42/21%  14.6 GiB  ETA 3:46:40")


def test_without_a_known_peak_it_shows_tflops():
    assert "  413 TFLOP/s  " in text(train_line(ROW, 95368, 1.0))
    assert "  0.52 GFLOP/s  " in text(train_line(ROW | {"tflops": 0.000518}, 6, 1.0))  # a CPU


@pytest.mark.parametrize(
    ("more", "kept", "dropped"),
    [
        ({"sent_weight_mib": 12.3}, "14.6 GiB", "sent"),
        ({"sent_weight_mib": 12.3, "memory_gib_min": 3.0}, "3.0-14.6 GiB", "TFLOP/s"),
        ({"loss_scale": 2.0**40, "skipped": 1234, "iteration": 10**5, "grad_norm": 1e30, "loss": math.nan}, "loss scale", "GiB"),
    ],
)
def test_a_wide_line_drops_the_least_important_fields(more: dict[str, Any], kept: str, dropped: str):
    line = text(train_line(ROW | more, 10**6, 3600.0 * 10))
    assert len(line) <= WIDTH
    assert kept in line
    assert dropped not in line
    assert "loss" in line
    assert line.endswith("ETA 10:00:00")


@pytest.mark.parametrize(("steps", "shown"), [({}, False), ({"eager_steps": 0}, False), ({"eager_steps": 3}, True)])
def test_steps_before_the_graphs_are_told_beside_their_time(steps: dict[str, int], shown: bool):
    assert ("  3 eager  143 ms  " in text(train_line(ROW | steps, 95368, 1.0))) == shown


def test_a_loss_that_is_no_number_is_red():
    styles = [part.style for part in train_line(ROW | {"loss": math.nan}, 10, 1.0) if part.text == "loss nan"]
    assert styles == ["bold red"]


def test_the_line_of_an_evaluation():
    row = {"kind": "valid", "iteration": 400, "loss": 3.25, "ppl": 25.79, "bits_per_byte": 1.0234}
    assert text(evaluation_line(row))[8:] == "  valid at iteration 400  loss 3.2500  perplexity 25.79  1.0234 bits per byte"
    assert text(evaluation_line(row | {"bits_per_byte": None})).endswith("perplexity 25.79")


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.4, "0"), (897.0, "897"), (9999.0, "9,999"), (61_897.0, "61.9k"), (897_000.0, "897k"), (1.06e6, "1.06M"), (2.5e9, "2.50G")],
)
def test_numbers_are_short(value: float, words: str):
    assert short(value) == words


def test_durations():
    assert [duration(seconds) for seconds in (0, 59.6, 3723, 90000)] == ["0:00:00", "0:01:00", "1:02:03", "25:00:00"]
