"""The lines of `--fp8-guard`; whole runs are in `tests/megatron/lm/training/test_fp8_guard.py`."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron.lm.run.reports.guard_log import describe_guard, report_changes
from msamp.nn.linear import FP8Linear
from msamp.nn.precision_guard import Change, LayerGuard, LayerState, linear_layers


def guard() -> LayerGuard:
    return LayerGuard(dict(linear_layers([("fc", FP8Linear.from_linear(nn.Linear(16, 16)))])))


def test_the_first_line_says_what_is_raised_on_a_resume():
    made = guard()
    text = "FP8 guard: 1 linear layers, checked every 50 steps for saturation 0.001, underflow 0.5, SQNR 15 dB"
    assert describe_guard(made) == text
    made.load_state_dict({"layers": {"fc": {"raised": True, "since": 3, "count": 0, "why": "x"}}})
    assert describe_guard(made) == f"{text}; 1 of them are in BF16"
    assert made.raised == {"fc": LayerState(True, 3, 0, "x")}


@pytest.mark.parametrize("main", [True, False])
def test_changes_are_written_and_printed_by_rank_0(main: bool, capsys: pytest.CaptureFixture[str]):
    written: list[dict[str, Any]] = []
    metrics: Any = SimpleNamespace(main=main, write=written.append)
    report_changes(metrics, guard(), [Change(7, "fc", False, "input underflow 0.8, above 0.5", 4)])
    assert written[0]["kind"] == "fp8_guard"
    assert (written[0]["iteration"], written[0]["layers_in_bf16"], written[0]["steps"]) == (7, 0, 4)
    printed = " ".join(capsys.readouterr().out.split())
    text = "iteration 7, --fp8-guard: fc returns to FP8 after 4 steps in BF16 (input underflow 0.8, above 0.5)"
    assert printed == (text if main else "")
    report_changes(metrics, None, [])
