"""The check of grids: what it says of runs that end, differ, hang or hide their error, and one case of it whole on two processes."""

import argparse
import importlib
import time
from pathlib import Path

import pytest
import torch

from helpers import tiny
from helpers.refusals import code
from megatron.lm.config.cli import parse_args
from tools import check_grids
from tools.check_grids import FAULT, Run, fault_verdict, held, main
from tools.precisions import case_flags, known, legal_case, precision_flags

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


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("O0", ["--precision", "bf16"]),
        ("O2", ["--precision", "O2"]),
        ("O3+blockwise", ["--precision", "O3", "--fp8-recipe", "blockwise"]),
        ("coat+mxfp8", ["--precision", "coat", "--fp8-recipe", "mxfp8"]),
        ("te-bf16", ["--precision", "te-bf16"]),
    ],
)
def test_a_precision_as_tools_name_it_is_what_the_trainer_takes(text, flags):
    assert precision_flags(text) == flags
    assert text in known() or text == "O0"
    config = parse_args(["--preset", "125m", "--micro-batch-size", "1", "--train-iters", "1", *flags])
    assert config.precision.recipe.name == flags[1]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("O4", "precision 'O4' is unknown"),
        ("O2+rows", "'rows' is unknown; .*blockwise"),
        ("bf16+blockwise", "bf16 has no FP8 GEMM"),
        ("te-bf16+blockwise", "te-bf16 has no FP8 GEMM"),
    ],
)
def test_what_is_no_precision_is_refused_by_name(text, word):
    with pytest.raises(ValueError, match=word):
        precision_flags(text)
    with pytest.raises(argparse.ArgumentTypeError, match=word):
        legal_case(text)


def test_flags_follow_a_precision():
    assert case_flags("O2+blockwise --master-format bf16") == [*precision_flags("O2+blockwise"), "--master-format", "bf16"]
    assert legal_case("O2 --exp-avg-sq-format fp8-e4m3") == "O2 --exp-avg-sq-format fp8-e4m3"
    config = parse_args(["--preset", "125m", "--micro-batch-size", "1", "--train-iters", "1", *case_flags("O2 --master-format bf16")])
    assert config.precision.master_format == "bf16"


# What benchmarks and reproductions refuse on their command lines, before anything runs.


REFUSALS = [
    ("bench.bench_attention", "", "GPU"),
    ("bench.baselines.bench_megatron", "--preset llama3-8b", "llama3-8b"),
    ("bench.baselines.bench_megatron", "--cases te-delayed", "GPU"),
    ("bench.baselines.bench_moe_baselines", "--layers 0", "--layers"),
    ("bench.bench_kernels", "--repeats 1", "--repeats"),
    ("bench.bench_kernels", "--only sort", "sort"),
    ("bench.bench_kernels", "", "GPU"),
    ("bench.bench_optimizer", "--levels O9", "O9"),
    ("bench.bench_optimizer", "--levels O3+--optimizer-states+coat", "--optimizer-states"),
    ("bench.bench_step", "--steps 1", "--steps"),
    ("bench.bench_step", "--levels O9+--deterministic", "O9"),
    ("reproduce.compare_precisions", "--steps 1", "--steps"),
]


@pytest.mark.parametrize(("tool", "flags", "message"), REFUSALS)
def test_what_a_tool_refuses(tool: str, flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """In the flags, `+` stands for a space within an argument."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert code(importlib.import_module(f"tools.{tool}").main, [word.replace("+", " ") for word in flags.split()]) == 2
    assert message in capsys.readouterr().err
