"""The slides' two lines in training loops."""

import io
import math

import pytest
import torch
from torch import nn

from helpers import dist
from helpers.numerics import bits
from msamp import amp

LEVELS = ("O0", "O1", "O2", "O3")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))


def batch(seed: int = 1, rows: int = 256, device="cpu"):
    """Inputs, and what a fixed small network makes of them."""
    generator = torch.Generator().manual_seed(100)
    teacher = torch.randn(32, 32, generator=generator) / 6
    x = torch.randn(rows, 32, generator=generator.manual_seed(seed))
    return x.to(device), torch.tanh(x @ teacher).to(device)


def backward(model, optimizer, x, y, factor: float = 1.0, **options) -> torch.Tensor:
    loss = (model(x) - y).square().mean() * factor
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return loss.detach()


def gradient(optimizer) -> torch.Tensor:
    return torch.cat([p.grad.detach().flatten() for p in amp.master_params(optimizer)]).float()


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains(level, device):
    model = mlp().to(device)
    options = {"lr": 1e-3, "eps": 1e-4} if level == "O3" else {"lr": 1e-3}
    model, optimizer = amp.initialize(model, torch.optim.AdamW(model.parameters(), **options), level, loss_scale=8.0)
    x, y = batch(device=device)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(float(backward(model, optimizer, x, y)))
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]
    assert amp.state_dict(optimizer)["skipped_steps"] == [0]


def trace(level: str, overflows: list[bool], **options) -> tuple[list[float], list[int]]:
    """Loss scales after each step, and the steps that moved no weight."""
    model = nn.Linear(4, 4)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), level, **options)
    scales, skipped = [], []
    for i, overflow in enumerate(overflows):
        before = [bits(p).clone() for p in amp.master_params(optimizer)]
        optimizer.zero_grad()
        backward(model, optimizer, torch.ones(2, 4), torch.zeros(2, 4), math.inf if overflow else 1.0)
        optimizer.step()
        scales.append(amp.state_dict(optimizer)["loss_scaler0"]["loss_scale"])
        skipped += [i] * all(torch.equal(b, bits(p)) for b, p in zip(before, amp.master_params(optimizer), strict=True))
    assert amp.state_dict(optimizer)["skipped_steps"] == [sum(overflows)]
    return scales, skipped


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_halves_the_scale_and_skips_and_the_scale_grows_again(level):
    pattern = [False, True, True, False, False, False, False, True]
    scales, skipped = trace(level, pattern, growth_interval=3)
    k = 2.0**10
    assert scales == [64 * k, 32 * k, 16 * k, 16 * k, 16 * k, 32 * k, 32 * k, 16 * k]
    assert skipped == [1, 2, 7]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_after_unscaling_is_fp32s_clipping(level, device):
    clipped = {}
    for each in ("O0", level):
        model = mlp().to(device)
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), each, loss_scale=256.0)
        backward(model, optimizer, *batch(device=device), factor=100.0)
        norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        clipped[each] = (norm, gradient(optimizer))
    (want_norm, want), (norm, got) = clipped["O0"], clipped[level]
    assert want_norm > 1.0
    assert norm.item() == pytest.approx(want_norm.item(), rel=2e-3)
    assert got.norm().item() == pytest.approx(0.5, rel=1e-4)
    assert float((got - want).norm() / want.norm()) < 5e-3


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_several_losses_add_their_gradients_and_keep_their_own_scales(level):
    x, y = batch(rows=64)
    model = mlp()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), level, loss_scale="dynamic", num_losses=2)
    one_by_one = []
    for loss_id in (0, 1):
        backward(model, optimizer, x, (-1) ** loss_id * y, loss_id=loss_id)
        one_by_one.append(gradient(optimizer))
        optimizer.zero_grad()
    backward(model, optimizer, x, y, loss_id=0)
    backward(model, optimizer, x, -y, loss_id=1)
    both = gradient(optimizer)
    assert torch.allclose(both, one_by_one[0] + one_by_one[1], rtol=1e-5, atol=1e-7)
    optimizer.step()

    optimizer.zero_grad()
    backward(model, optimizer, x, y, loss_id=0)
    backward(model, optimizer, x, y, math.inf, loss_id=1)  # only its own scale is halved, and the whole step is skipped
    before = [bits(p).clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(b, bits(p)) for b, p in zip(before, model.parameters(), strict=True))
    state = amp.state_dict(optimizer)
    assert [state[f"loss_scaler{i}"]["loss_scale"] for i in (0, 1)] == [2.0**16, 2.0**15]
    assert state["skipped_steps"] == [1]


def started(level: str, steps: range, model=None, optimizer=None):
    """A run with momentum, a schedule's learning rate and an overflow in step 2."""
    if model is None:
        model = mlp()
        options = {"lr": 1e-3, "eps": 1e-4} if level == "O3" else {"lr": 1e-3}
        model, optimizer = amp.initialize(
            model, torch.optim.AdamW(model.parameters(), **options), level, loss_scale="dynamic", init_scale=256.0, growth_interval=2
        )
    for i in steps:
        x, y = batch(seed=i, rows=16)
        optimizer.zero_grad()
        backward(model, optimizer, x, y, math.inf if i == 2 else 1.0)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model_first", [True, False])
def test_a_saved_run_goes_on_bit_for_bit(level, model_first):
    model, optimizer = started(level, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(optimizer)}, file)
    started(level, range(5, 9), model, optimizer)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, second = started(level, range(0))
    for part in ["model", "optimizer", "amp"] if model_first else ["amp", "optimizer", "model"]:
        if part == "amp":
            amp.load_state_dict(second, saved["amp"])
        else:
            {"model": again, "optimizer": second}[part].load_state_dict(saved[part])
    started(level, range(5, 9), again, second)
    for p, q in zip([*model.parameters(), *amp.master_params(optimizer)], [*again.parameters(), *amp.master_params(second)], strict=True):
        assert torch.equal(bits(p), bits(q))
    want, got = amp.state_dict(optimizer), amp.state_dict(second)
    assert want["loss_scaler0"] == got["loss_scaler0"]
    assert want["skipped_steps"] == got["skipped_steps"] == [1]


def train_on_a_rank() -> tuple[list[float], int, float]:
    """A step in which the second rank's gradient overflows, and a good one, under DistributedDataParallel."""
    rank = torch.distributed.get_rank()
    model = mlp()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2")
    parallel = nn.parallel.DistributedDataParallel(model)
    for i in range(2):
        x, y = batch(seed=rank, rows=16)
        optimizer.zero_grad()
        backward(parallel, optimizer, x, y, math.inf if (i, rank) == (0, 1) else 1.0)
        optimizer.step()
    state = amp.state_dict(optimizer)
    weights = [float(p.double().sum()) for p in amp.master_params(optimizer)]
    return weights, state["skipped_steps"][0], state["loss_scaler0"]["loss_scale"]


def test_ranks_under_ddp_skip_together():
    first, second = dist.run(train_on_a_rank, 2)
    assert first == second
    assert first[1:] == (1, 2.0**15)


def test_a_backward_that_raises_leaves_the_gradients_as_they_were():
    model = mlp()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1")
    x, y = batch(rows=16)
    backward(model, optimizer, x, y)
    before = gradient(optimizer)

    def interrupted() -> None:
        with amp.scale_loss(model(x).sum(), optimizer) as scaled:
            scaled.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(gradient(optimizer), before)
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_initialize_refuses_what_does_not_fit_and_changes_nothing():
    model = mlp()
    stepped = torch.optim.Adam(model.parameters())
    model(batch()[0]).sum().backward()
    stepped.step()
    model.zero_grad()
    for arguments, options, message in (
        ((model, sgd(model), "O5"), {}, "opt_level is 'O5'"),
        ((model, sgd(model), "O2"), {"num_losses": 0}, "num_losses is 0; it must be at least 1"),
        ((model, sgd(model), "O2"), {"loss_scale": -1.0}, r"loss_scale is -1\.0"),
        ((model, "adam", "O2"), {}, "the optimizer is a str; it must be a torch.optim.Optimizer"),
        ((model, stepped, "O3"), {}, "already has FP32 states, but weights are FP16 at O3"),
        ((model, [sgd(model), sgd(model)], "O1"), {}, "in two optimizers"),
        ((model, torch.optim.AdamW(model.parameters()), "O3"), {}, "eps is 1e-08, which is 0 in FP16"),
        ((nn.Linear(2, 2).bfloat16(), sgd(model), "O1"), {}, "torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            amp.initialize(*arguments, **options)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    _, optimizer = amp.initialize(model, sgd(model), "O2")
    with pytest.raises(ValueError, match="the optimizer was already passed to"):
        amp.initialize(mlp(), optimizer)


def test_scale_loss_refuses_what_does_not_fit():
    model, other = mlp(), mlp()
    model, optimizer = amp.initialize(model, sgd(model), "O1", num_losses=2)
    _, apart = amp.initialize(other, sgd(other), "O1")
    x, y = batch(rows=16)
    with pytest.raises(ValueError, match=r"were not initialized by one msamp\.amp\.initialize call"):
        backward(model, sgd(model), x, y)
    with pytest.raises(ValueError, match=r"were not initialized by one msamp\.amp\.initialize call"):
        backward(model, [optimizer, apart], x, y)
    with pytest.raises(ValueError, match=r"loss_id is 2; it must be in \[0, 2\)"):
        backward(model, optimizer, x, y, loss_id=2)
    with pytest.raises(ValueError, match="no gradient reached the optimizer's parameters"), amp.scale_loss(model(x).sum(), optimizer):
        pass
    backward(model, optimizer, x, y, delay_unscale=True)
    with pytest.raises(ValueError, match="still scaled by another loss scale"):
        backward(model, optimizer, x, y, loss_id=1)
    backward(model, optimizer, x, y)
    optimizer.step()


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    _, optimizer = started("O2", range(1))
    before = amp.state_dict(optimizer)
    master = before["master_weights"][0][0].clone()
    o1 = amp.state_dict(started("O1", range(1))[1])
    with pytest.raises(ValueError, match=r"\[0\] master weights by optimizer, expected \[6\]"):
        amp.load_state_dict(optimizer, o1)
    with pytest.raises(ValueError, match="the state has 2 loss scales, but there are 1; initialize with num_losses=2"):
        amp.load_state_dict(optimizer, {**before, "loss_scaler1": before["loss_scaler0"]})
    broken = {
        **before,
        "loss_scaler0": {"loss_scale": 2.0**40, "unskipped": 0},
        "master_weights": [[x + 1 for x in before["master_weights"][0]]],
    }
    with pytest.raises(ValueError, match="initialize with wider limits"):
        amp.load_state_dict(optimizer, broken)
    assert torch.equal(amp.master_params(optimizer)[0], master)
