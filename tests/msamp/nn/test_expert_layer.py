"""The expert layer, against the same experts one by one."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import msamp
from helpers.choices import each_once
from helpers.moe_model import initialized, train
from msamp.kernels import scalar_pool
from msamp.nn import expert_layer
from msamp.nn.expert_layer import HostExperts
from msamp.nn.expert_ranks import gathered_routing
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.recipe import O1, O2, O3

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


@each_once(load=LOADS, recipe=[O1, O2, O3])
def test_converted_experts_in_fp8(load, recipe):
    plain, (x, probs, choices) = layer(), routed(load)
    converted = msamp.convert(layer(), recipe)
    tensors = (x, probs)
    weights = [[*plain.parameters()], [[*converted.fc1_weight.parameters()], [*converted.fc2_weight.parameters()]]]
    want, got = plain(x, probs, choices), converted(x, probs, choices)
    assert got.shape == want.shape
    if not want.any():
        assert not got.any()
        return
    assert sqnr_db(want, got) > 20
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    theirs = torch.autograd.grad(want, (*tensors, *weights[0]), grad)
    ours = torch.autograd.grad(got, (*tensors, *weights[1][0], *weights[1][1]), grad)
    ours = [*ours[:2], torch.stack(ours[2 : 2 + EXPERTS]), torch.stack(ours[2 + EXPERTS :])]
    assert all(sqnr_db(w, g) > 17 for w, g in zip(theirs, ours, strict=True))
    assert not ours[1][choices < 0].any()


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("O1", "O3", "bf16", "bf16-kahan", "collage-fp8", "coat")]


@pytest.mark.parametrize("recipe", ["O2", "collage-plus", *NIGHTLY])
def test_a_small_training_ends_at_the_loss_of_fp32(recipe):
    want, got = (train(*initialized(name), 25) for name in ("fp32", recipe))
    assert got == pytest.approx(want, rel=0.03)
    assert want < 0.2, "it has learned: the first loss is 0.6"


def test_the_experts_of_a_host_take_its_order_and_its_mark_of_another_rank():
    converted, (x, probs, choices) = msamp.convert(layer(), O2), routed()
    host = HostExperts.__new__(HostExperts)
    torch.nn.Module.__init__(host)
    host.gate_up_proj, host.down_proj = converted.fc1_weight, converted.fc2_weight
    marked = torch.where(choices == 3, EXPERTS, choices)
    want = converted(x, probs, torch.where(choices == 3, -1, choices))
    assert host(x, marked, probs).equal(want)
    assert host(x.bfloat16(), marked, probs.bfloat16()).dtype == torch.bfloat16


def on_gpu(recipe) -> tuple[msamp.Experts, msamp.Experts, list[torch.Tensor]]:
    """Plain BF16 and converted experts of 128 to 256 features, x, probabilities and choices with some of another rank."""
    torch.manual_seed(0)
    plain = msamp.Experts(8, 256, 128, device="cuda", dtype=torch.bfloat16)
    converted = msamp.Experts(8, 256, 128, device="cuda", dtype=torch.bfloat16)
    converted.load_state_dict(plain.state_dict())
    probs, choices = torch.rand(1000, 8, device="cuda").topk(2)
    choices = torch.where(choices == 5, -1, choices)
    return plain, msamp.convert(converted, recipe), [torch.randn(1000, 256, device="cuda").bfloat16(), probs, choices]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [O2, O3])
def test_on_the_gpu_fp8_is_near_torch_s_grouped_mm(recipe):
    plain, converted, (x, probs, choices) = on_gpu(recipe)
    want, got = ([], [])
    for experts, results in ((plain, want), (converted, got)):
        own = x.clone().requires_grad_(), probs.clone().requires_grad_()
        for _ in range(2):  # micro-batches
            y = experts(*own, choices)
            y.square().sum().backward()
        weights = [torch.stack([p.grad for p in w.parameters()]) if w is not None else None for w in experts.children()]
        results += [y.detach(), *(t.grad for t in own), *(weights or [p.grad for p in experts.parameters()])]
    assert all(sqnr_db(w.float(), g.float()) > 15 for w, g in zip(want, got, strict=True))
    one = one_by_one(x.float(), probs, choices, *(w.float() for w in plain.parameters()))
    assert sqnr_db(one, want[0].float()) > 40


@pytest.mark.gpu
def test_a_cuda_graph_follows_the_weights_and_the_choices():
    _, converted, (x, probs, choices) = on_gpu(O2)
    converted(x, probs, choices).sum().backward()  # warms up
    for p in converted.parameters():
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with scalar_pool.captured(), torch.cuda.graph(graph):
        y = converted(x, probs, choices)
        y.sum().backward()
    with torch.no_grad():
        choices.copy_(torch.rand(1000, 8, device="cuda").topk(2).indices)
        for p in converted.parameters():
            p.mul_(2.0)
            p.grad.zero_()
    graph.replay()
    grads = [p.grad.clone() for p in converted.parameters()]
    for p in converted.parameters():
        p.grad = None
    want = converted(x, probs, choices)
    want.sum().backward()
    assert y.equal(want)
    assert all(a.equal(p.grad) for a, p in zip(grads, converted.parameters(), strict=True))


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


@pytest.mark.parametrize(
    ("dtype", "capability", "width", "captured"),
    [
        (torch.bfloat16, (9, 0), 32, True),
        (torch.bfloat16, (8, 0), 32, False),
        (torch.bfloat16, (9, 0), 12, False),
        (torch.float32, (9, 0), 32, False),
        (torch.float16, (9, 0), 32, False),
    ],
)
def test_experts_whose_sizes_the_host_reads_are_refused_in_a_capture(dtype, capability, width, captured, monkeypatch):
    monkeypatch.setattr(expert_layer, "_capturing", lambda rows: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    layer = msamp.Experts(4, 16, width, dtype=dtype)
    probs, choices = torch.rand(8, 4).topk(2)
    refused = (
        contextlib.nullcontext() if captured else pytest.raises(ValueError, match=r"cannot be captured in a CUDA graph.*run eager steps")
    )
    with refused:
        layer(torch.randn(8, 16, dtype=dtype), probs, choices)


class Twice:
    """Two ranks with the same tokens, of which this is one."""

    ranks, fp8, fp8_sums = 2, True, False

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def start_gather(self, rows: torch.Tensor, label: str) -> Callable[[], torch.Tensor]:
        return lambda: torch.cat([rows, rows])

    def start_sum(self, partial: torch.Tensor, label: str) -> Callable[[], torch.Tensor]:
        own = partial.chunk(2)[self.rank]
        return lambda: own * 2  # the other rank has the same


def test_experts_of_other_ranks_become_minus_one_and_probabilities_have_gradients():
    probs = torch.tensor([[0.5, 0.25], [1.0, -0.0], [3e-39, 2.0]], requires_grad=True)  # every bit travels, as integers
    experts = torch.tensor([[0, 3], [2, -1], [1, 2]])
    for rank, own in ((0, [[0, -1], [-1, -1], [1, -1]]), (1, [[-1, 1], [0, -1], [-1, 0]])):
        found, chosen = gathered_routing(probs, experts, Twice(rank), first=2 * rank, count=2)  # type: ignore[arg-type]
        assert torch.equal(found, torch.cat([probs, probs]))
        assert chosen.tolist() == own + own
        grad = torch.arange(12.0).view(6, 2)
        (back,) = torch.autograd.grad(found, probs, grad)
        assert torch.equal(back, 2 * grad.chunk(2)[rank])
