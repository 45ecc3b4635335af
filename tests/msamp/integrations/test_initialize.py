"""`msamp.initialize` in plain PyTorch loops."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import msamp
from helpers.mlp_loop import adamw, batches, mlp, train
from helpers.numerics import through_a_file
from msamp.nn.linear import FP8Linear
from msamp.numerics import recipe
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.updates import format_names

LEVELS = ("O1", "O2", "O3")
every_level = pytest.mark.parametrize("level", LEVELS)


@pytest.mark.parametrize(
    ("level", "cls"),
    [
        pytest.param(level, cls, marks=[pytest.mark.nightly] * ((level == "O2") == (cls is torch.optim.AdamW)))
        for level in LEVELS
        for cls in (torch.optim.AdamW, torch.optim.Adam)
    ],
)
def test_the_loss_follows_the_fp32_curve(level, cls, device):
    plain, low = mlp().to(device), mlp().to(device)
    want = train(plain, cls(plain.parameters(), lr=4e-3), 50, device)
    got = train(*msamp.initialize(low, cls(low.parameters(), lr=4e-3), level), 50, device)
    assert want[-10:].mean() < 0.3 * want[0]
    assert got[0] == pytest.approx(want[0].item(), rel=0.02)
    assert torch.allclose(got[:25], want[:25], rtol=0.05)
    assert got[-10:].mean() < 1.15 * want[-10:].mean()


@every_level
def test_what_has_become_of_the_model(level):
    model = mlp()
    low, optimizer = msamp.initialize(model, adamw(model), opt_level=level)
    assert low is model
    assert isinstance(optimizer, LowPrecisionOptimizer)
    assert [type(low[i]) for i in (0, 3, 5)] == [FP8Linear] * 3
    assert type(low[2]) is nn.LayerNorm
    assert low[0].weight.format is (E4M3 if level == "O3" else FP16)
    train(low, optimizer, 1)
    state = optimizer.state[low[0].weight]
    formats = format_names(recipe.by_name(level).states)
    found = {k: str(state[n].format) if isinstance(state[n], ScalingTensor) else "fp32" for k, n in (("m", "exp_avg"), ("v", "exp_avg_sq"))}
    assert found == {k: formats[k] for k in ("m", "v")}
    assert ("master" in state) == (level == "O3")
    assert optimizer.state[low[2].weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[low[0].bias]["exp_avg"].dtype == torch.float32


# ------------------------------------------------------------------------------------------------------ optimizers


@every_level
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam], ids=lambda c: c.__name__)
def test_param_groups_are_mapped(level, cls):
    model = mlp()
    groups = [
        {"params": []},  # as transformers' Trainer makes one of what does not decay, beside LoRA adapters
        {"params": [model[0].weight, model[0].bias], "lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3},
        {"params": [model[3].weight]},
        {"params": [model[2].weight, model[2].bias], "weight_decay": 0.0},
    ]
    low, optimizer = msamp.initialize(model, cls(groups, lr=5e-4, weight_decay=0.1), level)
    keys = ("lr", "betas", "eps", "weight_decay", "decoupled")
    first = (1e-3, (0.8, 0.9), 1e-6, 0.3, cls is torch.optim.AdamW)
    found = [({id(p) for p in g["params"]}, tuple(g[k] for k in keys)) for g in optimizer.param_groups]
    assert found[1:] == [
        ({id(low[0].weight), id(low[0].bias)}, first),
        ({id(low[3].weight)}, (5e-4, (0.9, 0.999), 1e-8, 0.1, first[-1])),
        ({id(low[2].weight), id(low[2].bias)}, (5e-4, (0.9, 0.999), 1e-8, 0.0, first[-1])),
    ]
    formats = [g["formats"] for g in optimizer.param_groups]
    states, fp32 = format_names(recipe.by_name(level).states), format_names(recipe.FP32_STATES)
    assert formats == [[], [states, fp32], states, fp32]
    train(low, optimizer, 1)


@pytest.mark.parametrize("scheduler", [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 4)),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=20),
], ids=["cosine", "lambda", "one cycle"])  # fmt: skip
def test_a_scheduler_on_the_returned_optimizer_sets_the_same_rates(scheduler):
    model = mlp()
    plain = adamw(copy.deepcopy(model))
    low, optimizer = msamp.initialize(model, adamw(model), "O2")
    schedules = scheduler(plain), scheduler(optimizer)
    for _ in range(8):
        train(low, optimizer, 1)
        plain.step()
        for s in schedules:
            s.step()
        assert {g["lr"] for g in optimizer.param_groups} == {plain.param_groups[0]["lr"]}


class MyAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("make_it", [torch.optim.Adafactor, torch.optim.NAdam, MyAdamW, torch.optim.Adagrad])
def test_any_other_optimizer_is_refused_with_those_accepted(make_it):
    model = mlp()
    optimizer = make_it(model.parameters())
    with pytest.raises(ValueError, match=rf"{type(optimizer).__name__}; accepted are torch\.optim\.AdamW, torch\.optim\.Adam, "):
        msamp.initialize(model, optimizer)
    assert_untouched(model)


@every_level
def test_a_weight_with_nan_is_refused_by_name(level):
    model = mlp()
    with torch.no_grad():
        model[3].weight[5, 5] = float("nan")
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=r"3\.weight holds 1 values that are NaN or infinite"):
        msamp.initialize(model, optimizer, level)
    assert_untouched(model)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def assert_untouched(model: nn.Module) -> None:
    assert not any(isinstance(m, FP8Linear) for m in model.modules())
    assert not any(isinstance(p, ScalingTensor) for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------- models


# ------------------------------------------------------------------------------------------------------- the loop


@every_level
@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.nightly)])
def test_a_step_with_a_bad_gradient_is_skipped_and_training_goes_on(bad, level):
    model = mlp()
    low, optimizer = msamp.initialize(model, adamw(model), level)
    train(low, optimizer, 5)
    before = [p.detach().clone() for p in low.parameters()]
    optimizer.zero_grad()
    (low(next(batches(1))[0]) * bad).sum().backward()
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(low.parameters(), before, strict=True))
    losses = train(low, optimizer, 20)
    assert optimizer.skipped_steps == 1
    assert losses[-1] < 0.8 * losses[0]


@every_level
def test_saved_with_weights_only_and_loaded_it_goes_on_bit_for_bit(level):
    model = mlp()
    low, optimizer = msamp.initialize(model, adamw(model), level)
    train(low, optimizer, 20)
    saved = through_a_file({"model": low.state_dict(), "optimizer": optimizer.state_dict()}, weights_only=True)
    fresh = mlp()
    other, other_optimizer = msamp.initialize(fresh, adamw(fresh, lr=1.0), level)
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    assert train(low, optimizer, 5, seed=7).equal(train(other, other_optimizer, 5, seed=7))


def test_autocast_around_the_loop():
    """torch keeps its casts of FP32 weights, here of the first layer, to the end of the outermost block."""
    model = mlp()
    low, optimizer = msamp.initialize(model, adamw(model), accept=lambda name, _: name != "0")
    with torch.autocast("cpu", torch.bfloat16):
        losses = train(low, optimizer, 25)
        within = low(torch.ones(16, 64))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(low(torch.ones(16, 64)), within)
    assert losses[-1] < 0.5 * losses[0]


# With inductor too: what it does to operators that change their arguments, no other backend does.
@pytest.mark.nightly(8)  # by default: a layer in test_linear.py of nn
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_compiled_model_trains_alike(backend: str):
    a, b = mlp(), mlp()
    low, optimizer = msamp.initialize(a, adamw(a))
    other, other_optimizer = msamp.initialize(b, adamw(b))
    torch._dynamo.reset()
    want = train(low, optimizer, 18)
    got = train(torch.compile(other, backend=backend), other_optimizer, 18)
    assert torch.allclose(got, want, rtol=1e-3)


def test_a_wrapped_model_has_the_bits_of_the_model_itself_and_either_loads_the_other_s_states():
    """torch.compile and checkpoint_wrapper rename weights, while filters choose, masters leave ties and thresholds are drawn by name."""
    first, second = mlp().bfloat16(), mlp().bfloat16()
    second[5], wrapped = checkpoint_wrapper(second[5]), torch.compile(second, backend="eager")
    accept = msamp.filters.exclude_names("^5$")
    low, optimizer = msamp.initialize(first, adamw(first), accept=accept)
    other, other_optimizer = msamp.initialize(wrapped, adamw(wrapped), accept=accept)
    assert train(low, optimizer, 2, dtype=torch.bfloat16).equal(train(other, other_optimizer, 2, dtype=torch.bfloat16))
    assert msamp.PrecisionGuard(low, optimizer).names == msamp.PrecisionGuard(other, other_optimizer).names
    assert all(p.equal(q) for p, q in zip(low.parameters(), other.parameters(), strict=True))
    optimizer.load_state_dict(other_optimizer.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(msamp.TransformerBlock(32, 2, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_compiled_layers_have_no_graph_break_and_a_compiled_step_has_one_around_the_update():
    counters = torch._dynamo.utils.counters
    for model, x, breaks in ((mlp(), next(batches(1))[0], 0), (Blocks(), torch.randn(6, 2, 32), 1)):  # a block is called as a whole
        torch._dynamo.reset()
        counters.clear()
        model, optimizer = msamp.initialize(model, adamw(model), "O3", accept=lambda name, layer: True)
        for block in getattr(model, "blocks", [model]):
            block.compile(backend="aot_eager")
        model(x).square().mean().backward()
        optimizer.step()
        assert len(counters["graph_break"]) == breaks
    torch._dynamo.reset()
    whole, eager = mlp(), mlp()
    whole, optimizer = msamp.initialize(whole, adamw(whole))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (whole(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend="eager")
    got = torch.stack([compiled(x, y) for x, y in batches(4)])
    assert torch.allclose(got, train(*msamp.initialize(eager, adamw(eager)), 4), rtol=1e-3)


@pytest.mark.gpu
@every_level
def test_graphs_of_torch_train_as_an_eager_loop_does(level):
    """With mode="reduce-overhead" torch replays CUDA graphs, which write amaxes and read weights where they have always been."""
    losses = []
    for compiled in (False, True):
        net = mlp().cuda()
        low, optimizer = msamp.initialize(net, adamw(net), level)
        torch._dynamo.reset()
        if compiled:
            low.compile(mode="reduce-overhead")
        curve = []
        for x, y in batches(34, "cuda"):
            torch.compiler.cudagraph_mark_step_begin()
            loss = (low(x).float() - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            curve.append(float(loss))
        losses.append(curve)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[0][-1] < losses[0][0]


def test_the_optimizer_clips():
    def step(factor: float, clip_grad: float | None) -> tuple[float, torch.Tensor]:
        model = mlp()
        low, optimizer = msamp.initialize(model, adamw(model, eps=1.0), clip_grad=clip_grad)  # eps 1: Adam minds the gradient's size
        (low(next(batches(1))[0]).sum() * factor).backward()
        optimizer.step()
        return optimizer.grad_norm.item(), low[2].bias.detach()

    norm, _ = step(1.0, None)
    clipped, halved = step(1.0, norm / 2), step(0.5, None)
    assert clipped[0] == norm
    assert torch.allclose(clipped[1], halved[1], rtol=1e-3)
    model = mlp()
    with pytest.raises(ValueError, match=r"clipping norm is -1\.0; it must be greater than 0"):
        msamp.initialize(model, adamw(model), clip_grad=-1.0)
    assert_untouched(model)
