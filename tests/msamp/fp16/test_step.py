"""Masters, unscaling and skipped steps of one optimizer."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.choices import each_value
from helpers.numerics import bits
from msamp import amp

ULP = 2.0**-10  # of FP16 at 1


def weight_and_optimizer(level: str, lr: float, value: float = 1.0):
    """One weight w in a model w x, under plain gradient descent."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=lr), level, loss_scale=8.0)


def descend(model, optimizer) -> None:
    """A step whose gradient is -1 exactly."""
    with amp.scale_loss(-model(torch.ones(1, 1)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_an_fp16_weight_loses_updates_below_half_an_ulp_and_a_master_keeps_them():
    for ratio in (2.0**-12, 2.0**-11):  # update / value; the second is a tie and goes to even
        fp16, mixed = weight_and_optimizer("O3", ratio), weight_and_optimizer("O2", ratio)
        for _ in range(64):
            fp16[1].zero_grad()
            descend(*fp16)
            descend(*mixed)
        assert fp16[0].weight.item() == 1.0
        assert amp.master_params(mixed[1])[0].item() == 1.0 + 64 * ratio
        assert mixed[0].weight.item() == 1.0 + 64 * ratio
    fp16 = weight_and_optimizer("O3", 1.01 * 2.0**-11)
    descend(*fp16)
    assert fp16[0].weight.item() == 1.0 + ULP


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Rprop": (torch.optim.Rprop, {}),
}


@each_value(level=["O1", "O2"], kind=OPTIMIZERS)
def test_a_skipped_step_changes_no_bit_of_weights_and_states(kind, level):
    torch.manual_seed(0)
    cls, options = OPTIMIZERS[kind]
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model, optimizer = amp.initialize(model, cls(model.parameters(), **options), level, loss_scale=8.0)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(2, 4) * torch.arange(4.0)).square().sum() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    def everything() -> list[torch.Tensor]:
        state = optimizer.state_dict()["state"]
        states = [x for _, each in sorted(state.items()) for _, x in sorted(each.items()) if isinstance(x, torch.Tensor)]
        return [bits(x).clone() for x in [*model.parameters(), *amp.master_params(optimizer), *states]]

    step(1.0)
    before = everything()
    step(math.inf)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    step(math.nan)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert amp.state_dict(optimizer)["skipped_steps"] == [2]
    step(1.0)
    assert any(not torch.equal(a, b) for a, b in zip(before, everything(), strict=True))


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a device: scalars read from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_host_waits_once_a_step(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, num_losses=2)
    with HostReads() as reads:
        for loss_id in (0, 1):
            with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer, loss_id) as scaled:
                scaled.backward()
        assert reads.count == 0
        optimizer.step()
        assert reads.count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gpu_is_waited_for_only_in_step(level):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).cuda()
    model, optimizer = amp.initialize(model, torch.optim.AdamW(model.parameters(), fused=True), level)
    x = torch.randn(32, 64, device="cuda")
    for mode in ("default", "error"):  # the first round moves the scale to the device
        loss = model(x).square().mean()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
    assert amp.state_dict(optimizer)["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 2, "overflows_left": 1}


def test_weights_written_from_outside_become_the_master_and_equal_ones_leave_it():
    model, optimizer = weight_and_optimizer("O2", 2.0**-12)
    descend(model, optimizer)
    (master,) = amp.master_params(optimizer)
    assert (master.item(), model.weight.item()) == (1.0 + 2.0**-12, 1.0)
    model.load_state_dict({"weight": torch.ones(1, 1)})  # what is there: the master keeps its digits
    descend(model, optimizer)
    assert master.item() == 1.0 + 2.0**-11
    model.load_state_dict({"weight": torch.full((1, 1), 3.0)})
    descend(model, optimizer)
    assert master.item() == 3.0 + 2.0**-12
    nn.init.constant_(model.weight, 5.0)
    assert amp.state_dict(optimizer)["master_weights"][0][0].item() == 5.0
    model, optimizer = weight_and_optimizer("O1", 1.0)
    with torch.autocast("cpu", enabled=False):  # the outermost block: to its end torch keeps O1's casts
        descend(model, optimizer)
        assert model(torch.ones(1, 1)).item() == 2.0


def test_steps_that_would_go_wrong_are_refused():
    model, optimizer = weight_and_optimizer("O2", 0.1)
    with pytest.raises(ValueError, match="step got a closure"):
        optimizer.step(lambda: model(torch.ones(1, 1)).sum())
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ValueError, match="a gradient that no scale_loss unscaled"):
        optimizer.step()
    with (
        pytest.raises(ValueError, match="a gradient that no scale_loss unscaled"),
        amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled,
    ):
        scaled.backward()
    optimizer.zero_grad()  # drops it, as Apex's
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    with pytest.raises(ValueError, match="still scaled by the loss scale"):
        optimizer.step()
    with pytest.raises(ValueError, match="still scaled by the loss scale"):
        amp.master_params(optimizer)
    assert model.weight.item() == 1.0
