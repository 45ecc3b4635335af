"""Attention over split sequences as it is measured: every case of ours on two processes, and what a failure leaves."""

from typing import Any

import pytest
import torch

from helpers import dist
from tools.bench import bench_context
from tools.bench.bench_attention import PASSES, Shape

OURS = [case for case in bench_context.CASES if case != "torch"]
SIZE = Shape(1, 4, 256, 128, 2)


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
    keys = 2 * 128 * 2 * 128 / bench_context.MIB  # bytes of a rank's keys and values, at one per element
    each = {"ring, BF16": (2, 6), "ring, FP8 wire": (1, 4), "ring, FP8": (1, 2.75), "heads, BF16": (6, 12), "heads, FP8 wire": (4, 10)}
    each |= {name: (forward / 2, both / 2) for name, (forward, both) in each.items() if name.startswith("heads")}  # half of the heads stays
    for name, (forward, both) in each.items():
        assert sent[name] == pytest.approx((forward * keys, both * keys), abs=3e-4), name
    lost = bench_context.failed("torch", ValueError("no\nkernel"))
    assert list(lost) == list(found["ring, FP8"][0])
    assert lost["error"] == "no kernel"
