"""What each of Apex's levels makes of a model."""

import pytest
import torch
from torch import nn

import msamp
from msamp.fp16.opt_level import by_name, check_model, is_norm, prepare_model


class Net(nn.Module):
    """Remembers the dtype in which its first layer and its norm answer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.register_buffer("shift", torch.full((32,), 0.1))
        self.register_buffer("inv_freq", torch.ones(2))

    def forward(self, x, *, pair=False):
        hidden = self.linear(x)
        normed = self.norm(hidden + self.shift.to(hidden.dtype))
        self.seen = (hidden.dtype, normed.dtype)
        y = self.head(normed)
        return {"logits": y, "pair": (y, torch.arange(3))} if pair else y


def prepared(name: str, **options) -> Net:
    net = Net()
    prepare_model(net, by_name(name), **options)
    return net


HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("name", "linear", "norm", "buffer", "seen"),
    [
        ("O0", FULL, FULL, FULL, (FULL, FULL)),
        ("O1", FULL, FULL, FULL, (HALF, HALF)),  # as torch.autocast has it on a CPU: a norm reads and writes FP16, and adds up in FP32
        ("O2", HALF, FULL, HALF, (HALF, HALF)),
        ("O3", HALF, HALF, HALF, (HALF, HALF)),
    ],
)
def test_dtypes_of_a_level(name, linear, norm, buffer, seen):
    net = prepared(name)
    out = net(torch.randn(8, 16), pair=True)
    assert (net.linear.weight.dtype, net.norm.weight.dtype, net.shift.dtype, net.inv_freq.dtype) == (linear, norm, buffer, FULL)
    assert net.seen == seen
    assert (out["logits"].dtype, out["pair"][0].dtype, out["pair"][1].dtype) == (FULL, FULL, torch.int64)


def test_masters_start_from_the_values_before_they_were_rounded():
    net, plain = Net(), Net()
    net.tied = nn.ParameterList([net.linear.weight])
    full = prepare_model(net, by_name("O2"))
    assert set(full) == {net.linear.weight, net.linear.bias, net.head.weight, net.head.bias}
    assert torch.equal(full[net.linear.weight], plain.linear.weight)
    assert torch.equal(net.linear.weight, plain.linear.weight.half())


class SomeRMSNorm(nn.Module):
    pass


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "norm"),
    [
        (nn.BatchNorm2d(2), True),
        (nn.InstanceNorm1d(2), True),
        (nn.SyncBatchNorm(2), True),
        (nn.GroupNorm(1, 2), True),
        (nn.RMSNorm(2), True),
        (SomeRMSNorm(), True),
        (PreNorm(), False),
        (nn.Linear(2, 2), False),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_counts_as_a_norm(module, norm):
    assert is_norm(module) is norm


def test_unknown_levels_and_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="opt_level is 'O4'; choose one of O0, O1, O2, O3"):
        by_name("O4")
    with pytest.raises(ValueError, match="the model has no parameters"):
        check_model(nn.Tanh(), by_name("O1"))
    half = Net().half()
    with pytest.raises(ValueError, match=r"linear\.weight is torch\.float16; .*model\.float\(\)"):
        check_model(half, by_name("O1"))
    for check in (lambda net: check_model(net, by_name("O1")), msamp.initialize):
        with pytest.raises(ValueError, match="already passed to msamp"):
            check(nn.Sequential(prepared("O1")))
        with pytest.raises(ValueError, match="the model is a list; pass a torch"):
            check([Net()])
    with pytest.raises(ValueError, match=r"a DataParallel, .*initialize first, then wrap"):
        check_model(nn.DataParallel(Net()), by_name("O1"))
    fp8, _ = msamp.initialize(Net())
    with pytest.raises(ValueError, match="is a ScalingTensor"):
        check_model(fp8, by_name("O1"))
    for value in (1e5, float("nan")):
        large = Net()
        large.head.weight.data[0, 0] = value
        check_model(large, by_name("O1"))
        with pytest.raises(ValueError, match=r"head\.weight has values outside \+-65504"):
            check_model(large, by_name("O2"))
    started = Net()
    started(torch.randn(2, 16)).sum().backward()
    with pytest.raises(ValueError, match=r"has a gradient, .*before the first backward"):
        check_model(started, by_name("O3"))
