"""Attention over split sequences as it is measured: every case of ours on two processes, and what a failure leaves."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

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
    each = {
        "ring, BF16": (2, 6),
        "ring, FP8 wire": (1, 4),
        "ring, FP8": (1, 2.75),
        "heads, BF16": (6, 12),
        "heads, FP8 wire": (4, 10),
        "heads, FP8": (3, 7),
    }
    each |= {name: (forward / 2, both / 2) for name, (forward, both) in each.items() if name.startswith("heads")}  # half of the heads stays
    for name, (forward, both) in each.items():
        assert sent[name] == pytest.approx((forward * keys, both * keys), abs=3e-4), name
    lost = bench_context.failed("torch", ValueError("no\nkernel"))
    assert list(lost) == list(found["ring, FP8"][0])
    assert lost["error"] == "no kernel"


def scores(query: Tensor, key: Tensor, scale: float | None, causal: bool) -> Tensor:
    products = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return products.masked_fill(torch.ones(products.shape[-2:]).triu(1).bool(), -torch.inf) if causal else products


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: None,
    lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The forward operator to which PyTorch's ring gives the parts, for CPUs."""
    logits = scores(query, key, scale, causal)
    offset = torch.zeros((), dtype=torch.int64)
    return (logits.softmax(3) @ value.double()).to(query.dtype), logits.logsumexp(3).float(), offset, offset


def efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: None, o: Tensor, lse: Tensor, *args: Any, **_: Any
) -> Any:
    """Its backward; of `args` the last is `causal`, if it is True."""
    p = (scores(query, key, None, args[-1] is True) - lse.double()[..., None]).exp()
    ds = p * (grad.double() @ value.double().mT - (grad.double() * o.double()).sum(3, True)) * query.shape[-1] ** -0.5
    return *((x @ y.double()).to(query.dtype) for x, y in ((ds, key), (ds.mT, query), (p.mT, grad))), None


def torch_on_ranks() -> list[dict[str, Any]]:
    """PyTorch's ring runs the kernels of GPUs only. On a CPU their operators get the definition, everything else is PyTorch's."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU")
    one_process = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool = False) -> Tensor:
        if not isinstance(q, DTensor):
            return one_process(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]

    functional.scaled_dot_product_attention = scaled_dot_product_attention  # PyTorch replaces it by this name
    return bench_context.measured("torch", SIZE, torch.device("cpu"), 2)


def test_pytorchs_ring_computes_attention_over_all_tokens():
    for _, both in dist.run(torch_on_ranks, 2):
        assert min(both[f"sqnr_{name}"] for name in ("o", "dq", "dk", "dv")) > 40


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
