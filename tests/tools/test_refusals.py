"""What benchmarks and reproductions refuse on their command lines, before anything runs."""

import importlib

import pytest
import torch

from helpers.refusals import code

REFUSALS = [
    ("bench.bench_attention", "", "no GPU is available"),
    ("bench.bench_data_parallel", "--steps 1", "give 2"),
    ("bench.bench_data_parallel", "--cases O4", "O3"),
    ("bench.bench_fsdp", "--cases O9", "'O9' is unknown; choose one of bf16, torchao, O1, O2"),
    *(
        ("bench.baselines.bench_moe_baselines", f"{flag} 0", f"argument {flag}: 0 is out of range")
        for flag in ("--layers", "--micro-batches", "--steps")
    ),
    ("bench.bench_kernels", "--repeats 1", "argument --repeats: 1 is out of range: give 2"),
    ("bench.bench_kernels", "--only sort", "invalid choice: 'sort'"),
    ("bench.bench_kernels", "", "no GPU is available"),
    ("bench.bench_optimizer", "--repeats 1", "argument --repeats: 1 is out of range: give 2"),
    ("bench.bench_optimizer", "--levels O9", "precision 'O9' is unknown"),
    ("bench.bench_optimizer", "--levels O3+--optimizer-states+coat", "unknown flag --optimizer-states"),
    ("bench.bench_optimizer", "--levels bf16 collage-plus --flags=--optimizer-state+coat", "contradicts precision collage-plus"),
    ("bench.bench_optimizer", "--flags=--optimizer-states+coat", "unknown flag --optimizer-states"),
    *(("bench.bench_recorder", f"{flag} 0", f"argument {flag}: 0 is out of range") for flag in ("--steps", "--record-interval")),
    ("bench.bench_step", "--steps 1", "argument --steps: 1 is out of range: give 2"),
    ("bench.bench_step", "--levels --deterministic", "unrecognized arguments: --deterministic"),
    ("bench.bench_step", "--levels O9+--deterministic", "'O9'"),
    ("reproduce.coat_memory", "--cases O9+--flag", "--cases 'O9 --flag': give a precision"),
    ("reproduce.coat_memory", "--micro-batch-size 0", "argument --micro-batch-size: 0 is out of range"),
    ("reproduce.coat_memory", "", "no GPU is available"),
    ("reproduce.compare_precisions", "--minutes 0", "--minutes 0: give a number above 0"),
    ("reproduce.compare_tuning", "--load there", "neither --sft nor --dpo is given"),
    ("reproduce.compare_tuning", "--load there --sft a --minutes 0", "--minutes 0: give a number above 0"),
    ("reproduce.compare_tuning", "--load there --sft a --cases --lr+1", "begin with a recipe"),
    ("reproduce.compare_tuning", "--load there --sft a --cases +", "begin with a recipe"),
    *(("reproduce.table8", f"--ranks 64 {n}", f"--ranks: {n} is out of range: give 1 to 4096") for n in (0, 4097, 100_000_000)),
]


@pytest.mark.parametrize(("tool", "flags", "message"), REFUSALS)
def test_what_a_tool_refuses(tool: str, flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """In the flags, `+` stands for a space within an argument."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert code(importlib.import_module(f"tools.{tool}").main, [word.replace("+", " ") for word in flags.split()]) == 2
    assert message in capsys.readouterr().err
