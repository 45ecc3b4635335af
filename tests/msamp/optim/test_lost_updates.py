"""The share of the next update that the master weights will lose, against the step that follows, at every level."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import msamp
from helpers import dist
from msamp.integrations import fsdp
from msamp.numerics.descent_quality import undelivered_frac
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.lost_updates import lost_updates, update_distances
from msamp.optim.optimizer import FP8AdamW
from msamp.optim.updates.adamw import AdamW

SMALL, USUAL = 1e-7, 1e-3
BF16_MODELS = ("bf16-dmw", "collage-light", "collage-plus", "bf16-a")


def linears(recipe: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.normal_(0, 0.02)
    return model.bfloat16() if recipe in BF16_MODELS else model


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, recipe: str) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    (model(x.bfloat16() if recipe in BF16_MODELS else x).float() - x.roll(1, 1)).square().mean().backward()


def before_a_step(recipe: str, lr: float, steps: int = 2, **settings: Any) -> tuple[nn.Module, FP8AdamW]:
    """After some steps, with the gradients of the next in place."""
    model = linears(recipe)
    settings = {"master_rounding": "nearest"} | settings
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=lr), recipe=recipe, **settings)
    for step in range(steps + 1):
        backward(model, optimizer, step, recipe)
        if step < steps:
            optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("recipe", "small", "usual"),
    [
        ("O0", (0.0, 0.01), (0.0, 0.01)),
        ("O1", (0.9, 1.0), (0.0, 0.02)),
        ("O2", (0.9, 1.0), (0.0, 0.02)),
        ("O3", (0.9, 1.0), (0.0, 0.02)),
        ("coat", (0.0, 0.01), (0.0, 0.01)),
        ("collage-light", (0.0, 0.02), (0.0, 0.02)),
        ("collage-plus", (0.0, 0.02), (0.0, 0.02)),
        ("bf16-dmw", (0.98, 1.0), (0.0, 0.02)),
        ("bf16-a", (0.98, 1.0), (0.0, 0.02)),
    ],
)
def test_every_level_loses_what_its_masters_cannot_hold(recipe, small, usual):
    for lr, (least, most) in ((SMALL, small), (USUAL, usual)):
        model, optimizer = before_a_step(recipe, lr)
        shares = lost_updates(optimizer)
        assert list(shares) == [name for name, _ in model.named_parameters()]
        for name in ("0.weight", "2.weight"):
            assert least <= shares[name] <= most, (name, lr)


def values(optimizer: FP8AdamW, p: torch.Tensor) -> torch.Tensor:
    return fp32_values(optimizer.state[p].get("master", p)).double().clone()


@pytest.mark.parametrize("recipe", ["O1", "O2", "O3"])
def test_the_share_is_that_of_the_step_that_follows(recipe):
    """`undelivered_frac` of the real step, against the update by hand."""
    lr = 3e-6
    model, optimizer = before_a_step(recipe, lr)
    shares, before = lost_updates(optimizer), {}
    for name, p in model.named_parameters():
        state, old = optimizer.state[p], values(optimizer, p)
        g = fp32_values(ScalingTensor.quantize(p.grad.float(), msamp.formats.E4M3) if p.dim() == 2 else p.grad).double()
        m, v = (fp32_values(state[key]).double() for key in ("exp_avg", "exp_avg_sq"))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square()
        before[name] = old, -lr * (m / (1 - 0.9**3)) / ((v / (1 - 0.999**3)).sqrt() + 1e-8) - lr * 1e-2 * old
    optimizer.step()
    for name, p in model.named_parameters():
        old, update = before[name]
        assert shares[name] == pytest.approx(undelivered_frac(update, values(optimizer, p) - old), abs=5e-3), name
    assert 0.4 < shares["0.weight"] < 0.9


def bits(optimizer: FP8AdamW) -> list[bytes]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [t for p in params for t in (p, *(v for _, v in sorted(optimizer.state[p].items())))]
    plain = [part.detach() for t in tensors for part in ([t.payload, t.scale_inv] if isinstance(t, ScalingTensor) else [t])]
    return [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in plain]


@pytest.mark.parametrize("recipe", ["O2", "O3", "coat", "collage-light"])
def test_it_changes_no_bit_of_the_training(recipe):
    ends = []
    for asks in (False, True):
        model, optimizer = before_a_step(recipe, USUAL, steps=0)
        for step in range(3):
            backward(model, optimizer, step, recipe)
            if asks:
                lost_updates(optimizer)
            optimizer.step()
        ends.append(bits(optimizer))
    assert ends[0] == ends[1]


def test_what_has_no_update_has_lost_none():
    model, optimizer = before_a_step("O2", SMALL, steps=0)
    assert lost_updates(optimizer) == dict.fromkeys(dict(model.named_parameters()), 0.0)  # before the first step
    model, optimizer = before_a_step("O2", SMALL)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    model[0].weight.grad = None
    assert lost_updates(optimizer)["0.weight"] == 0.0
    assert lost_updates(optimizer)["2.weight"] > 0.9
    optimizer.param_groups[0]["lr"] = 0.0
    assert set(lost_updates(optimizer).values()) == {0.0}
    optimizer.param_groups[0]["lr"] = SMALL
    model[2].bias.grad.fill_(math.nan)  # the step will be skipped
    assert set(lost_updates(optimizer).values()) == {0.0}
    optimizer.step()
    assert optimizer.skipped_steps == 1


def test_fp32_masters_keep_what_fp16_masters_lose():
    recipe = msamp.recipes.O2.with_states(master=msamp.formats.FP32)
    model = linears("O2")
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=SMALL), recipe=recipe)
    for step in range(3):
        backward(model, optimizer, step, "O2")
        if step < 2:
            optimizer.step()
    assert max(lost_updates(optimizer).values()) < 0.01


@pytest.mark.parametrize("recipe", ["O1", "O2", "O3", "bf16-dmw"])
def test_stochastic_rounding_loses_nothing_but_leaves_most_elements(recipe):
    """An update of 1e-6 is a small part of a code: what arrives is a few elements that move by whole codes."""
    model, optimizer = before_a_step(recipe, 1e-6, steps=6, master_rounding="stochastic")
    distances = update_distances(optimizer, None)
    p, old = model[0].weight, values(optimizer, model[0].weight)
    wanted, arrived = distances[:, 0], distances[:, 1]
    optimizer.step()
    assert float((values(optimizer, p) == old).float().mean()) > 0.8
    matrices = [place for place, q in enumerate(model.parameters()) if q.dim() == 2]
    assert float(arrived[matrices].sum() / wanted[matrices].sum()) == pytest.approx(1.0, abs=0.35 if recipe == "bf16-dmw" else 0.1)
    if recipe != "bf16-dmw":  # in BF16 each code is a thousand updates: 6,000 elements tell little
        assert max(lost_updates(optimizer).values()) < 0.5


def test_other_updates_are_measured_too():
    for lr, least, most in ((SMALL, 0.9, 1.0), (1e-2, 0.0, 0.1)):
        model = linears("O2")
        matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) == matrix] for matrix in (True, False))
        given = [torch.optim.Muon(matrices, lr=lr), torch.optim.SGD(vectors, lr=lr, momentum=0.9)]
        model, optimizer = msamp.initialize(model, given, recipe="O2", master_rounding="nearest")
        backward(model, optimizer, 0, "O2")
        optimizer.step()
        backward(model, optimizer, 1, "O2")
        shares = lost_updates(optimizer)
        assert least <= shares["0.weight"] <= most  # Muon's, which takes whole parameters
        assert least <= shares["2.weight"] <= most


def many_layers(count: int) -> FP8AdamW:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=SMALL), recipe="O2", master_rounding="nearest")
    for step in range(2):
        backward(model, optimizer, step, "O2")
        if step < 1:
            optimizer.step()
    return optimizer


def test_a_sample_tells_of_the_whole():
    whole, sampled = (update_distances(many_layers(2), sample) for sample in (None, 1024))
    assert torch.all(sampled[:, 0] < 0.5 * whole[:, 0])
    torch.testing.assert_close(sampled[:, 1] / sampled[:, 0], whole[:, 1] / whole[:, 0], rtol=0, atol=0.05)


def test_many_layers_take_few_more_operators_than_few(monkeypatch):
    """The host issues them one by one, and a step is bound by that: whatever copies, compares and adds up takes all layers together."""
    counted = []
    for layers in (2, 12):
        optimizer = many_layers(layers)
        ready = optimizer.ready()
        decision = optimizer.decide(ready)
        with monkeypatch.context() as patch:  # what are a few launches on a GPU
            patch.setattr(optimizer, "ready", lambda ready=ready: ready)
            patch.setattr(optimizer, "decide", lambda _, decision=decision: decision)
            patch.setattr(AdamW, "run", lambda *_: None)
            with Names() as names:
                update_distances(optimizer, 1024)
        views = ("aten.slice", "aten.view", "aten.detach", "aten.select", "aten.alias")
        counted.append(Counter(name for name in names.found if not name.startswith(views)))
    assert sum(counted[0].values()) == sum(counted[1].values()) < 60, counted


class Names(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def on_two_ranks() -> list[tuple[dict[str, float], list[bytes]]]:
    """By level and with ZeRO or without: the shares, and the model's weights after the step."""
    found = []
    for recipe, zero in (("O2", False), ("O2", True), ("O3", True)):
        for asks in (True, False):
            model = linears(recipe)
            settings = {"recipe": recipe, "zero": zero, "clip_grad": 1.0, "master_rounding": "nearest"}
            model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=SMALL), **settings)
            shares: dict[str, float] = {}
            for step in range(3):
                backward(model, optimizer, 2 * step + torch.distributed.get_rank(), recipe)
                if asks:
                    shares = lost_updates(optimizer)
                optimizer.step()
            optimizer.wait()
            found.append((shares, [fp32_values(p).numpy().tobytes() for p in model.parameters()]))
    return found


@pytest.mark.nightly(20)
def test_several_processes_find_the_same_and_train_on():
    first, second = dist.run(on_two_ranks, 2)
    assert first == second
    for asked, usual in zip(first[::2], first[1::2], strict=True):
        assert asked[1] == usual[1]
        assert asked[0]["0.weight"] > 0.9
        assert asked[0].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def under_fsdp() -> dict[str, float]:
    recipe = msamp.recipes.O2.with_rounding(master="nearest")
    model = fsdp.prepare(linears("O2"), recipe=recipe)
    fully_shard(model)
    optimizer = fsdp.optimizer(model, torch.optim.AdamW(model.parameters(), lr=SMALL), recipe=recipe)
    shares: dict[str, float] = {}
    for step in range(2):
        backward(model, optimizer, 2 * step + torch.distributed.get_rank(), "O2")
        shares = lost_updates(optimizer)
        optimizer.step()
    return shares


@pytest.mark.nightly(15)
def test_rows_of_fsdp_are_added_up():
    first, second = dist.run(under_fsdp, 2)
    assert first == second
    assert first["0.weight"] > 0.9
    assert first["2.weight"] > 0.9
    assert first["0.bias"] < 0.01


def test_other_optimizers_are_refused():
    with pytest.raises(ValueError, match=r"the optimizer is AdamW; pass the optimizer from msamp\.initialize"):
        lost_updates(torch.optim.AdamW([nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]))
