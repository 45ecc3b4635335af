"""The comparison's numbers by hand, and its exit codes."""

import json

import pytest

from megatron.lm.tools import loss_compare
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
    result = loss_compare.compare(run("a", [4.0, 2.0], [3.0]), run("b", [4.4, 1.9], [3.03]), window=1)
    assert result.rel == pytest.approx(0.01)
    assert result.max_train == pytest.approx(0.1)
    assert result.mean_train == pytest.approx(0.075)
    assert (result.iterations, result.final) == (2, "validation, iteration 10")


def test_without_evaluation_the_training_loss_decides():
    result = loss_compare.compare(run("a", [4.0, 2.0]), run("b", [4.0, 2.1], [3.0]), window=1)
    assert result.rel == pytest.approx(0.05)
    assert result.final == "training (smoothed), iteration 20"


def test_runs_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="of a is at iteration 10, of b at 20: compare runs of equal length"):
        loss_compare.compare(run("a", [4.0], [3.0]), run("b", [4.0], [3.0, 2.0]), window=1)


@pytest.mark.parametrize(("loss", "code"), [(3.02, 0), (2.98, 0), (3.04, 1), (2.96, 1), (float("nan"), 1)])
def test_exit_code_tells_whether_the_limit_holds(metrics, capsys, loss, code):
    arguments = ["--base", metrics("O0", [4.0], [3.0]), "--other", metrics("O2", [4.0], [loss])]
    assert loss_compare.main([*arguments, "--max-rel", "0.01"]) == code
    assert loss_compare.main(arguments) == 0
    assert "final loss: validation, iteration 10" in capsys.readouterr().out


def test_bad_input_is_told(metrics, tmp_path, capsys):
    assert loss_compare.main(["--base", metrics("O0", [4.0]), "--other", f"O2={tmp_path}/none"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_run_that_diverged_is_said_to_have(metrics, capsys):
    arguments = ["--base", metrics("O0", [4.0, 3.0]), "--other", metrics("O2", [4.0, None]), "--window", "1"]
    assert loss_compare.main([*arguments, "--max-rel", "0.5"]) == 1
    assert "the final loss of O2 is not finite: it has diverged" in capsys.readouterr().out
    assert loss_compare.main([*arguments, "--max-rel", "nan"]) == 2
    assert "--max-rel nan must be 0 or more" in capsys.readouterr().err
