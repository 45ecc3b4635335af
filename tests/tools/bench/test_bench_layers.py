"""Benchmarks of attention, context parallelism and FSDP2, at toy size on a CPU."""

import argparse
from typing import Any

import pytest
import torch
import torch.distributed

from helpers import dist
from tools.bench import bench_attention, bench_context, bench_fsdp
from tools.bench.bench_attention import INPUTS, PASSES, Shape, cases, flops, shape


def test_shapes_are_read_and_wrong_ones_refused():
    assert shape("4x16x2048x128") == Shape(4, 16, 2048, 128, 16)
    assert shape("1x32x8192x128/8").groups == 8
    for text in ("4x16", "0x1x1x16", "axbxcxd"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a shape: give BATCHxHEADSxTOKENSxCHANNELS"):
            shape(text)
    with pytest.raises(argparse.ArgumentTypeError, match="4 heads in 3 groups: give a divisor"):
        shape("1x4x8x16/3")


@pytest.mark.parametrize("kind", INPUTS)
def test_every_case_runs_and_says_what_fp8_loses(kind):
    torch.manual_seed(0)
    found = list(cases(Shape(1, 2, 32, 16, 1), kind, "cpu"))
    assert [(c["what"], c["precision"], c["pass"]) for c, _ in found] == [
        (what, name, passes) for what in ("kernel", "layer") for name in ("bf16", "fp8") for passes in bench_attention.PASSES
    ]
    for columns, run in found:
        run()
        lost = [value for name, value in columns.items() if name.startswith("sqnr")]
        if columns["precision"] == "bf16":
            assert lost == [""] * 4
        else:
            assert min(lost) > (15 if kind == "normal" else 5)


def test_products_are_counted():
    assert flops(Shape(2, 4, 8, 16, 4), "forward") == 2 * 2 * 4 * 64 * 16
    assert flops(Shape(2, 4, 8, 16, 4), "forward and backward") == 3.5 * 2 * 2 * 4 * 64 * 16


# Attention over split sequences as it is measured: every case of ours on two processes, and what a failure leaves.


OURS = [case for case in bench_context.CASES if not case.startswith("torch") and "FP8 wire" not in case]
SIZE = Shape(1, 4, 128, 64, 2)


def on_ranks() -> dict[str, list[dict[str, Any]]]:
    return {case: bench_context.measured(case, SIZE, torch.device("cpu"), 2) for case in OURS}


def test_every_case_of_ours_runs_and_says_what_it_loses_and_sends_in_the_columns_of_a_failure():
    found = dist.run(on_ranks, 2)[0]
    sent = {}
    for case, (forward, both) in found.items():
        assert (forward["pass"], both["pass"]) == PASSES
        assert both["ms"] > 0
        least = {"BF16": 40, "FP8": 12}[case.partition(", ")[2]]
        assert min(both[f"sqnr_{name}"] for name in ("o", "dq", "dk", "dv")) > least, case
        assert 0.96 < min(both[f"slope_{name}"] for name in ("o", "dq", "dk", "dv")) < 1.01, case
        sent[case] = (forward["sent_mib"], both["sent_mib"])
    keys = 2 * 64 * 2 * 64 / bench_context.MIB  # bytes of a rank's keys and values, at one per element
    for name, forward, both in (("ring, BF16", 2, 6), ("heads, BF16", 3, 6)):
        assert sent[name] == pytest.approx((forward * keys, both * keys), abs=3e-4), name
    for name, forward, both in (("ring, FP8", 1, 2.75), ("heads, FP8", 1.5, 4.0)):  # and what is summed of the first token, per channel
        assert all(least * keys < mib < 1.6 * least * keys for least, mib in zip((forward, both), sent[name], strict=True)), name
    lost = bench_context.failed("torch", ValueError("no\nkernel"))
    assert list(lost) == list(found["ring, FP8"][0])
    assert lost["error"] == "no kernel"


TINY = "--layers 1 --hidden 32 --heads 2 --ffn 48 --vocab-size 32 --seq-length 16 --micro-batch-size 2 --warm-up 1 --steps 3 --lr 1e-2"


def measured(case: str) -> dict:
    options = bench_fsdp.parser().parse_args([*TINY.split(), "--cases", case])
    return bench_fsdp.measure(case, options, torch.device("cpu"))


NIGHTLY = [pytest.param(case, marks=pytest.mark.nightly(3)) for case in ("bf16", "coat graph fused")]


@pytest.mark.parametrize("case", ["O2 graph fused", *NIGHTLY])
def test_a_case_trains_and_tells_time_and_loss(case):
    row, other = dist.run(measured, 2, case)
    assert row["loss"] == other["loss"] < row["first_loss"]
    assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]
    assert row["tokens_s_gpu"] > 0
