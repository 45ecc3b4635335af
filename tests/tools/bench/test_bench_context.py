"""Attention over split sequences as it is measured: every case of ours on two processes, and what a failure leaves."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist
from tools.bench import bench_context
from tools.bench.bench_attention import PASSES, Shape

OURS = [case for case in bench_context.CASES if not case.startswith("torch")]
SIZE = Shape(1, 4, 128, 64, 2)


def on_ranks() -> dict[str, list[dict[str, Any]]]:
    return {case: bench_context.measured(case, SIZE, torch.device("cpu"), 2) for case in OURS}


def test_every_case_of_ours_runs_and_says_what_it_loses_and_sends_in_the_columns_of_a_failure():
    found = dist.run(on_ranks, 2)[0]
    sent = {}
    for case, (forward, both) in found.items():
        assert (forward["pass"], both["pass"]) == PASSES
        assert both["ms"] > 0
        least = {"BF16": 40, "FP8 wire": 20, "FP8": 12}[case.partition(", ")[2]]
        assert min(both[f"sqnr_{name}"] for name in ("o", "dq", "dk", "dv")) > least, case
        sent[case] = (forward["sent_mib"], both["sent_mib"])
    keys = 2 * 64 * 2 * 64 / bench_context.MIB  # bytes of a rank's keys and values, at one per element
    for name, forward, both in (("ring, BF16", 2, 6), ("heads, BF16", 3, 6)):
        assert sent[name] == pytest.approx((forward * keys, both * keys), abs=3e-4), name
    for name, forward, both in (("ring, FP8", 1, 2.75), ("heads, FP8", 1.5, 4.0)):  # and what is summed of the first token, per channel
        assert all(least * keys < mib < 1.6 * least * keys for least, mib in zip((forward, both), sent[name], strict=True)), name
    lost = bench_context.failed("torch", ValueError("no\nkernel"))
    assert list(lost) == list(found["ring, FP8"][0])
    assert lost["error"] == "no kernel"


def wrong_on_ranks() -> dict[str, Any]:
    """Each rank attends to its own tokens only, as one whose attention was not replaced."""

    def local(case: str, peers: Any, size: Shape, tensors: Sequence[Tensor]) -> bench_context.Run:
        parts = [bench_context.own(x, peers) for x in tensors]
        return functools.partial(bench_context.differentiated, bench_context.attention, parts)

    bench_context.ours = local
    with pytest.raises(bench_context.WrongResult) as found:
        bench_context.measured("ring, BF16", SIZE, torch.device("cpu"), 2)
    return bench_context.failed("ring, BF16", found.value)


def test_a_case_that_computes_something_else_is_not_timed():
    first, second = dist.run(wrong_on_ranks, 2)
    assert first == second
    assert first["ms"] == first["tflops"] == ""
    assert first["sqnr_o"] < 30
    assert first["error"].startswith("computes something else: SQNR in dB against one GPU is o ")
