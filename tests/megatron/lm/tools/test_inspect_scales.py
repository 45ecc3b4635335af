"""Recorded steps in words and pictures."""

import json

import pytest

from megatron.lm.tools import inspect_scales
from megatron.lm.tools.inspect_scales import read, words

CASTS, UPDATES = ["amax", "underflow", "saturation", "sqnr_db", "scale_exponent"], ["norm", "update_norm", "descent", "lost"]
FC2, QKV = "decoder.layers.3.mlp.linear_fc2", "decoder.layers.0.self_attention.linear_qkv"


def step(iteration, underflow=0.0, sqnr=25.0, lost=0.0, descent=1.0, saturation=0.0, mu=None):
    row = [1.0, underflow, saturation, sqnr, 5]
    return {
        "iteration": iteration,
        "skipped": False,
        "columns": {"casts": CASTS, "updates": UPDATES},
        "casts": {FC2: {"grad_output": row, "input": [1.0, 0.001, 0.0, 31.0, 6]}, QKV: {"m": [1.0, 0.0, 0.0, None, 3]}},
        "updates": {FC2: [3.0, 1.0, descent, lost], QKV: [4.0, 0.0, 0.0, 0.0]},
        "total": [5.0, 1.0, descent, lost / 2],
        "mu": {FC2: mu} if mu else {},
    }


def write(path, steps, tail=""):
    path.write_text("".join(json.dumps(one) + "\n" for one in steps) + tail)
    return path


def test_the_worst_is_named_first_and_since_when(tmp_path):
    shares = {200: 0.05, 300: 0.0, 400: 0.02, 500: 0.12}
    steps = [step(i, underflow=share, lost=0.6 if i == 500 else 0.0) for i, share in shares.items()]
    told = words(read(write(tmp_path / "p", steps)), most=10)
    assert told == [
        "layer 3 linear_fc2 grad_output: 12 % underflow since step 400",
        "layer 3 linear_fc2 update: 60 % of the elements do not move since step 500",
    ]
    assert words(read(tmp_path / "p"), most=1)[1] == "and 1 more, less bad"


def test_elements_that_stay_are_no_complaint_where_the_update_arrives(tmp_path):
    one = step(7, lost=0.99)
    for share, complains in ((0.02, False), (0.7, True)):
        new = one | {
            "columns": {"casts": CASTS, "updates": [*UPDATES, "undelivered"]},
            "updates": {name: [*values, share if name == FC2 else 0.0] for name, values in one["updates"].items()},
            "total": [*one["total"], share],
        }
        told = words(read(write(tmp_path / "p", [new])), most=10)
        assert not any("do not move" in sentence for sentence in told)
        assert ("layer 3 linear_fc2 update: 70 % of the update is lost since step 7" in told) == complains


def test_the_last_line_of_an_iteration_counts_and_a_torn_one_does_not(tmp_path):
    steps = read(write(tmp_path / "p", [step(20, 0.3), step(10), step(20)], tail='{"iteration": 30, "cas'))
    assert [one["iteration"] for one in steps] == [10, 20]
    assert steps[1]["series"][FC2, "grad_output"]["underflow"] == 0.0


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "cannot be read"),
        ("", [], "contains no recorded step"),
        ("{}\n", [], "line 1 is not a recorded step"),
        (json.dumps(step(1) | {"casts": [1]}), [], "line 1 is not a recorded step"),
        (json.dumps(step(1, underflow="many")), [], "'many' is not a finite number"),
        (json.dumps(step(1) | {"iteration": 1e400}), [], "is not a recorded step"),
    ],
)
def test_refusals(tmp_path, capsys, content, arguments, message):
    file = tmp_path / "p"
    if content is not None:
        file.write_text(content)
    assert inspect_scales.main([str(file), *arguments]) == 2
    assert message in capsys.readouterr().err
