"""The comparison's numbers by hand, and its exit codes."""

import json

import pytest

from megatron.lm.tools import inspect_scales, loss_compare
from megatron.lm.tools.inspect_scales import read, words
from megatron.lm.tools.report import Run


def lines(losses, kind="train"):
    return [{"kind": kind, "iteration": 10 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]


def run(name, train, valid=()):
    return Run(name=name, train=lines(train), valid=lines(valid, "valid"))


@pytest.fixture
def metrics(tmp_path):
    def write(name, train, valid=()):
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines(train) + lines(valid, "valid")))
        return f"{name}={path}"

    return write


def test_numbers():
    base, other = run("a", [4.0, 2.0], [3.0]), run("b", [4.4, 1.9], [3.03])
    assert loss_compare.final_losses(base, other, window=1) == (3.0, 3.03, "validation, iteration 10")
    assert loss_compare.final_losses(base, run("b", [4.4, 1.9]), window=1) == (2.0, 1.9, "training (smoothed), iteration 20")


def test_runs_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="iteration 10, of b at 20"):
        loss_compare.final_losses(run("a", [4.0], [3.0]), run("b", [4.0], [3.0, 2.0]), window=1)


@pytest.mark.parametrize(("loss", "code"), [(3.02, 0), (2.98, 0), (3.04, 1), (2.96, 1), (None, 1)])
def test_exit_code_tells_whether_the_limit_holds(metrics, capsys, loss, code):
    arguments = [metrics("O0", [4.0], [3.0]), metrics("O2", [4.0], [loss])]
    assert loss_compare.main([*arguments, "--max-rel", "0.01"]) == code
    assert loss_compare.main(arguments) == 0
    assert "final loss: validation, iteration 10" in capsys.readouterr().out


@pytest.fixture
def groups(metrics):
    def write(base, other):
        bases = [metrics(f"base{seed}", [4.0], [loss]).replace(f"base{seed}=", "O0=") for seed, loss in enumerate(base)]
        others = [metrics(f"other{seed}", [4.0], [loss]).replace(f"other{seed}=", "O2=") for seed, loss in enumerate(other)]
        return [*bases, *others]

    return write


@pytest.mark.promise("Tools", "`msamp compare` pairs runs by seed and prints mean, 95 % interval and verdict.")
def test_groups_of_runs_are_paired_by_seed(groups, capsys):
    arguments = groups([3.00, 3.10, 2.90], [3.003, 3.103, 2.903])
    assert loss_compare.main([*arguments, "--seeds", "7", "8", "9"]) == 0
    out = capsys.readouterr().out
    assert "seed" in out
    assert all(f"\n{seed} " in out for seed in (7, 8, 9))
    assert "O2 against O0: +0.0030 nats per token, +0.10 % (95 % interval +0.09 to +0.11 %)" in out
    assert "3 of 3 seeds above: holds within 0.01 nats per token" in out


def test_a_wide_interval_shows_nothing_and_fails_a_limit(groups, capsys):
    wide = groups([3.00, 3.10, 2.90], [3.06, 3.05, 2.91])
    assert loss_compare.main(wide) == 0
    assert "2 of 3 seeds above: not shown within 0.01 nats per token" in capsys.readouterr().out
    assert loss_compare.main([*wide, "--max-rel", "0.01"]) == 1
    assert loss_compare.main([*wide, "--max-rel", "0.1"]) == 0
    assert loss_compare.main([*groups([3.0, 3.1], [3.3, 3.41]), "--max-rel", "0.05"]) == 1


@pytest.mark.parametrize(
    ("base", "other", "more", "told"),
    [
        ([3.0, 3.1], [3.0], [], "the runs are 2 of O0, 1 of O2: give runs of two names, as many of each"),
        ([3.0, 3.1], [3.0, 3.1], ["--seeds", "1"], "--seeds 1: give 2 different seeds"),
        ([3.0, 3.1], [3.0, 3.1], ["--seeds", "1", "1"], "--seeds 1 1: give 2 different seeds"),
    ],
)
def test_runs_that_do_not_pair_are_refused(groups, capsys, base, other, more, told):
    assert loss_compare.main([*groups(base, other), *more]) == 2
    assert told in capsys.readouterr().err


def test_a_diverged_run_of_a_group_fails_every_limit(groups, capsys):
    assert loss_compare.main([*groups([3.0, 3.1], [3.0, None]), "--max-rel", "0.5"]) == 1
    assert "a loss is non-finite" in capsys.readouterr().out


# Recorded steps in words and pictures.


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
