import pytest
import torch.distributed

from helpers import dist
from tools.bench import bench_fsdp

TINY = "--layers 1 --hidden 32 --heads 2 --ffn 48 --vocab-size 32 --seq-length 16 --micro-batch-size 2 --warm-up 1 --steps 3 --lr 1e-2"


def measured(case: str) -> dict:
    options = bench_fsdp.parser().parse_args([*TINY.split(), "--cases", case])
    return bench_fsdp.measure(case, options, torch.device("cpu"))


NIGHTLY = [pytest.param(case, marks=pytest.mark.nightly(3)) for case in ("O2", "coat graph fused")]


@pytest.mark.parametrize("case", ["bf16", "O2 graph fp8-reduce fused", "coat", *NIGHTLY])
def test_a_case_trains_and_tells_time_and_loss(case):
    row, other = dist.run(measured, 2, case)
    assert row["loss"] == other["loss"] < row["first_loss"]
    assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    assert row["tokens_s_gpu"] > 0


@pytest.mark.parametrize("case", ["fp32", "bf16 fused", "O2 graph graph", "torchao fp8-reduce", "coat coat"])
def test_unknown_cases_are_refused(case, capsys):
    with pytest.raises(SystemExit):
        bench_fsdp.parser().parse_args(["--cases", case])
    assert (
        f"case {case!r} is unknown; choose one of bf16, torchao, O1, O2, O3, coat, alone or followed by compile or graph"
        in capsys.readouterr().err
    )
