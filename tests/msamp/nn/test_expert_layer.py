"""The expert layer, against the same experts one by one."""

import pytest
import torch
import torch.nn.functional as F

import msamp
from helpers.choices import each_once
from msamp.nn import expert_layer

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 40, 32, 48, 4, 2


def layer(dtype: torch.dtype = torch.float32) -> msamp.Experts:
    torch.manual_seed(3)
    return msamp.Experts(EXPERTS, HIDDEN, WIDTH, dtype=dtype)


def routed(load: str = "random") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, probabilities and choices."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn((TOKENS, HIDDEN), generator=g)
    probs, experts = torch.rand((TOKENS, EXPERTS), generator=g).topk(TOP_K)
    if load == "one expert takes all":
        experts = torch.full_like(experts, 2)
    elif load == "others are on another rank":
        experts = torch.where(experts < 2, experts, -1)
    elif load == "all are on another rank":
        experts = torch.full_like(experts, -1)
    elif load == "no tokens":
        x, probs, experts = x[:0], probs[:0], experts[:0]
    return x.requires_grad_(), probs.requires_grad_(), experts


def one_by_one(x, probs, experts, fc1, fc2) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(len(fc1)):
        token, choice = torch.where(experts == e)
        gate, up = (x[token] @ fc1[e].t()).chunk(2, 1)
        out = out.index_add(0, token, (F.silu(gate) * up) @ fc2[e].t() * probs[token, choice, None])
    return out


LOADS = ["random", "one expert takes all", "others are on another rank", "all are on another rank", "no tokens"]


@each_once(load=LOADS, grouped=[True, False])
def test_plain_experts(load, grouped, monkeypatch):
    if not grouped:
        monkeypatch.setattr(expert_layer, "_torch_multiplies", lambda rows, weight: False)
    experts, (x, probs, choices) = layer(), routed(load)
    tensors = (x, probs, experts.fc1_weight, experts.fc2_weight)
    want, got = one_by_one(x, probs, choices, *tensors[2:]), experts(x, probs, choices)
    torch.testing.assert_close(got, want)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    for ours, theirs in zip(*(torch.autograd.grad(y, tensors, grad, allow_unused=True) for y in (got, want)), strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)


def test_two_ranks_share_the_experts():
    whole, (x, probs, choices) = layer(), routed()
    total = torch.zeros_like(x)
    for rank in range(2):
        part = msamp.Experts(EXPERTS // 2, HIDDEN, WIDTH)
        for own, all_of in zip(part.parameters(), whole.parameters(), strict=True):
            own.data.copy_(all_of.data[2 * rank : 2 * rank + 2])
        own = choices - 2 * rank
        total = total + part(x, probs, torch.where((own >= 0) & (own < 2), own, -1))
    torch.testing.assert_close(total, whole(x, probs, choices))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_where_a_linear_layer_rounds(dtype):
    experts, (x, probs, choices) = layer(dtype), routed()
    want = one_by_one(x.to(dtype).float(), probs, choices, *(w.float() for w in experts.parameters()))
    y = experts(x.to(dtype), probs, choices)
    assert y.dtype == dtype
    assert (y - want).norm() < (0.01 if dtype == torch.bfloat16 else 0.002) * want.norm()
    with torch.autocast("cpu", dtype):
        assert layer()(x, probs, choices).dtype == dtype


def test_second_derivatives():
    experts, (x, probs, choices) = layer(), routed()
    (first,) = torch.autograd.grad(experts(x, probs, choices).square().sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(one_by_one(x, probs, choices, *experts.parameters()).square().sum(), x, create_graph=True)
    for ours, theirs in zip(*(torch.autograd.grad(g.square().sum(), (x, probs)) for g in (first, want)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: msamp.Experts(0, 8, 8), "there are 0 experts of width 8 for 8 features; all three must be at least 1"),
        (lambda: layer()(torch.zeros(3, HIDDEN), torch.zeros(3, 2).bfloat16(), torch.zeros(3, 2).long()), "probs are torch.bfloat16"),
        (lambda: layer()(torch.zeros(3, 16), torch.zeros(3, 2), torch.zeros(3, 2).long()), r"weights are .* for 16 features"),
        (lambda: layer()(torch.zeros(3, HIDDEN).half(), torch.zeros(3, 2), torch.zeros(3, 2).long()), "x is torch.float16 and the weights"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
