"""The check of grids: what it says of runs that end, differ, hang or hide their error, and one case of it whole on two processes."""

import time
from pathlib import Path

import pytest

from helpers import tiny
from tools import check_grids
from tools.check_grids import FAULT, Run, fault_verdict, held, main

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 60 --global-batch-size 8 --lr-warmup-iters 2 "
    "--split 80,15,5 --make-vocab-size-divisible-by 32"
)


def run(code: int | None = 0, lines: tuple[str, ...] = (), seconds: float = 5.0) -> Run:
    return Run(seconds, time.time(), code, list(lines), [])


@pytest.mark.parametrize(
    ("ended", "wanted"),
    [
        (run(1, (f"{FAULT} in backward {time.time():.3f}",)), "ends"),
        (run(1, (f"{FAULT} in backward {time.time() - 50:.3f}",)), "ends 50 s after the fault"),
        (run(1, ("error: something else",)), "exit code 1, and the error is not reported"),
        (run(0, (f"{FAULT} in backward {time.time():.3f}",)), "exit code 0, and the error is not reported"),
        (run(None, ("waiting",)), "hangs: waiting"),
    ],
)
def test_what_is_said_of_an_error_on_one_rank(ended: Run, wanted: str):
    assert fault_verdict(ended) == wanted


def test_what_is_said_of_losses():
    wanted = {5: 2.0, 6: 1.9}
    assert check_grids._difference(dict(wanted), wanted, 0.0) == "same"
    assert check_grids._difference({5: 2.0, 6: 1.901}, wanted, 0.0) == "step 6: 1.901000, not 1.900000"
    assert check_grids._difference({5: 2.0, 6: 1.919}, wanted, 0.02) == "within 1.00%"
    assert check_grids._difference({6: 1.9}, wanted, 0.02) == "steps [6] to [6], not 5 to 6"


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    assert main(["--data", "x", "--cases", "O9"]) == 2
    assert main(["--data", "x", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--cases 'O9' is unknown; choose from O0 DP" in said
    assert "already contains files: remove it, or give another folder" in said


@pytest.mark.nightly(60)
@pytest.mark.timeout(600)
def test_a_case_on_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prefix = tiny.write_data(tmp_path)
    flags = ["--data", str(prefix), "--gpus", "0", "--iters", "6", "--out", str(tmp_path / "out"), "--cases", "O2 TP", "--flags", SMALL]
    assert main(flags) == 0, capsys.readouterr().out
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    row = dict(zip(check_grids.COLUMNS, (cell.strip("| ") for cell in cells), strict=True))
    assert held(row)
