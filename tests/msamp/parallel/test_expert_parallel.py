"""Experts that two ranks share, against all experts on one: results, gradients, bytes on the wire, and what is refused."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import msamp
from helpers import dist
from msamp.comm.counters import WireBytes
from msamp.nn.expert_matrices import ExpertMatrices
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.recipe import O2
from msamp.parallel.expert_parallel import ExpertParallel

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K, RANKS = 24, 32, 48, 4, 2, 2
WIRES = ("plain", "fp8", "bf16", "fp8-sums")


def routed(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, probabilities and choices of the tokens of all ranks, and a gradient."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn((RANKS * TOKENS, HIDDEN), generator=g).to(dtype)
    probs, experts = torch.rand((RANKS * TOKENS, EXPERTS), generator=g).topk(TOP_K)
    return x, probs, experts, torch.randn(x.shape, generator=g).to(dtype)


def layer(count: int, **options: Any) -> msamp.Experts:
    torch.manual_seed(3)
    whole = [torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 6, torch.randn(EXPERTS, HIDDEN, WIDTH) / 7]
    made = msamp.Experts(count, HIDDEN, WIDTH, **options)
    for own, values in zip(made.parameters(), whole, strict=True):
        own.data.copy_(values[made.first : made.first + count])
    return made


def passed(experts: msamp.Experts, x: Tensor, probs: Tensor, chosen: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Results and gradients; those of the weights by expert."""
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = experts(x, probs, chosen)
    y.backward(grad)
    found = {"y": y.detach(), "x": x.grad, "probs": probs.grad}
    for name in experts.weight_names:
        weight = getattr(experts, name)
        parts = [p.grad for p in weight.matrices] if isinstance(weight, ExpertMatrices) else weight.grad
        found |= {f"{name}.{e}": part for e, part in enumerate(parts, experts.first)}
    return found


def shared() -> tuple[dict[str, dict[str, Tensor]], dict[str, dict], list[str]]:
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    own, found, sent, said = slice(rank * TOKENS, (rank + 1) * TOKENS), {}, {}, []
    for wire in WIRES:
        counter = WireBytes()
        ranks = ExpertParallel(group, wire="fp8" if wire == "plain" else wire, sent=counter)
        made = layer(EXPERTS // RANKS, ranks=ranks)
        experts = made if wire == "plain" else msamp.convert(made, O2)
        found[wire] = passed(experts, *(x[own] for x in routed()))
        sent[wire] = counter.rows()
    assert copy.deepcopy(experts).ranks is ranks
    bare = torch.nn.Sequential(layer(EXPERTS // RANKS, ranks=ranks))
    for attempt in (
        lambda: experts(*(x[own][1:] for x in routed()[:3])),
        lambda: layer(2, ranks=ExpertParallel(group))(*(x[own][rank:] for x in routed()[:3])),
        lambda: pickle.dumps(ranks),
        lambda: experts(routed()[0][own], *routed()[1:3]),
        lambda: msamp.initialize(bare, torch.optim.AdamW(bare.parameters()), "O2"),
    ):
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
    return found, sent, said


@pytest.fixture(scope="module")
def ranks() -> list:
    return dist.run(shared, RANKS)


@pytest.mark.parametrize("wire", WIRES)
def test_results_and_gradients_are_those_of_one_process(ranks: list, wire: str):
    whole = layer(EXPERTS)
    want = passed(whole if wire == "plain" else msamp.convert(whole, O2), *routed())
    for name in ("y", "x", "probs"):
        got = torch.cat([found[wire][name] for found, *_ in ranks])
        assert sqnr_db(want[name], got) > (120 if wire == "plain" else 20), name
    weights = {name: g for found, *_ in ranks for name, g in found[wire].items() if "weight" in name}
    assert len(weights) == 2 * EXPERTS
    for name, got in weights.items():
        assert sqnr_db(want[name], got) > (120 if wire == "plain" else 20), name


def test_both_wires_have_the_same_bits(ranks: list):
    for found, *_ in ranks:
        assert all(torch.equal(found["fp8"][name], x) for name, x in found["bf16"].items())


def test_bytes_on_the_wire(ranks: list):
    block, routing = TOKENS * HIDDEN, TOKENS * TOP_K
    scales = {("activation", "amax all-reduce"): 8}  # just-in-time scales of both casts
    for _, sent, _ in ranks:
        both = {
            ("activation", "expert output reduce-scatter"): 4 * block,
            ("activation", "expert grad_input reduce-scatter"): 4 * block,
            ("activation", "expert routing all-gather"): 8 * routing,
            ("activation", "expert probabilities reduce-scatter"): 4 * routing,
        }
        gathers = [("activation", "expert tokens all-gather"), ("activation", "expert grad_output all-gather")]
        assert sent["plain"] == both | dict.fromkeys(gathers, 4 * block)
        assert sent["bf16"] == both | dict.fromkeys(gathers, 4 * block)  # x is FP32 here
        assert sent["fp8"] == both | dict.fromkeys(gathers, block) | scales
        sums = [("activation", f"expert {name} reduce-scatter") for name in ("output", "grad_input")]
        assert sent["fp8-sums"] == both | dict.fromkeys([*gathers, *sums], block) | {("activation", "amax all-reduce"): 16}


def test_what_is_refused(ranks: list):
    for *_, said in ranks:
        changed, unequal, pickled, gathered, loop = said
        assert loop.startswith("the experts of 0 are shared by several ranks, and the gradients of different experts would be averaged")
        assert changed.startswith("a rank that shares experts has 23 tokens, and had 24 before; the number must not change")
        assert unequal.startswith("the ranks that share experts have 24, 23 tokens; each must have the same number")
        assert pickled.startswith("experts that several ranks share cannot be pickled")
        assert gathered.startswith("x is (24, 32), probs are torch.float32 (48, 2)")
    with pytest.raises(ValueError, match="wire is 'fp4'; choose one of fp8, bf16, fp8-sums"):
        ExpertParallel(None, wire="fp4")  # type: ignore[arg-type]
