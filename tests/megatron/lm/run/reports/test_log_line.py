"""The log line: what it shows, in which order it drops fields, and that it never exceeds 120 columns."""

import math
from typing import Any

import pytest

from megatron.lm.run.reports.log_line import short, train_line
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


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.4, "0"), (897.0, "897"), (9999.0, "9,999"), (61_897.0, "61.9k"), (897_000.0, "897k"), (1.06e6, "1.06M"), (2.5e9, "2.50G")],
)
def test_numbers_are_short(value: float, words: str):
    assert short(value) == words
