"""Hooks that cast gradients during backward: which, when, in what order with other hooks, and what is alive at a time."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.choices import each_value
from helpers.numerics import KINDS, bits, codes, make
from msamp.nn.convert import convert
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.fp8_gradient import FP8Gradient
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.recipe import O2
from msamp.numerics.tensor import ScalingTensor
from msamp.optim import grad_cast
from msamp.optim.grad_cast import BackwardCasts, GradCast

FP8, BF16 = {"grad": "fp8-e4m3"}, {"grad": "bf16"}


def net(width: int = 32, depth: int = 3, dtype=torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return convert(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).to(dtype), O2)


def attached(model: nn.Module, formats=FP8) -> BackwardCasts:
    casts = BackwardCasts()
    casts.attach((p, formats) for p in model.parameters())
    return casts


def backward(model: nn.Module, seed: int = 0, **options: Any) -> torch.Tensor:
    p = next(model.parameters())
    x = torch.randn(16, p.shape[1], generator=torch.Generator().manual_seed(seed)).to(p.dtype)
    loss = model(x).float().square().mean()
    loss.backward(**options)
    return loss


def plain_gradients(seeds=(0,), **shape: Any) -> list[torch.Tensor]:
    model = net(**shape)
    for seed in seeds:
        backward(model, seed)
    return [p.grad for p in model.parameters()]


def assert_cast(model: nn.Module, plain: list[torch.Tensor]) -> None:
    """The gradients are those of `plain`, in E4M3 with one scale, to the bit."""
    for p, g in zip(model.parameters(), plain, strict=True):
        want = ScalingTensor.quantize(g, E4M3)
        assert p.grad.dtype == g.dtype
        assert codes(p.grad.held.payload).equal(codes(want.payload))
        assert p.grad.held.scale_inv.equal(want.scale_inv)


def narrow(model: nn.Module) -> list[bool]:
    return [isinstance(p.grad, FP8Gradient) and isinstance(p.grad.held, ScalingTensor) for p in model.parameters()]


@pytest.mark.parametrize("clear", ["none", "zero", "by hand"])
def test_after_zero_grad_it_is_cast_again(clear):
    model = net()
    casts = attached(model)
    for seeds in ((0,), (1, 2), (3,)):
        for seed in seeds:
            backward(model, seed)
        held = [p.grad for p in model.parameters()]
        if clear == "by hand":
            for p in model.parameters():
                p.grad = None
        else:
            model.zero_grad(set_to_none=clear == "none")
            assert all(g.eq(0).all() for g in held) == (clear == "zero")
    backward(model, 4)
    assert all(narrow(model))
    assert all((p.grad is g) == (clear == "zero") for p, g in zip(model.parameters(), held, strict=True))
    assert_cast(model, plain_gradients((4,)))
    assert casts is not None


def test_a_backward_that_fails_leaves_the_next_one_whole():
    model = net()
    casts = attached(model)
    handle = model[0].weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    handle.remove()
    model.zero_grad()
    backward(model)
    assert all(narrow(model))
    assert_cast(model, plain_gradients())
    assert casts is not None


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_the_loop_keep_their_order_and_may_take_the_gradient(before):
    model = net()
    seen, taken = [], []
    first, second, third = model.parameters()

    def halve(p: torch.Tensor) -> None:
        p.grad.mul_(0.5)

    def take(p: torch.Tensor) -> None:
        taken.append(p.grad)
        p.grad = None

    def register() -> None:
        first.register_hook(lambda g: seen.append(type(g)) or g * 2)
        second.register_post_accumulate_grad_hook(halve)
        third.register_post_accumulate_grad_hook(take)

    if before:
        register()
    casts = attached(model)
    if not before:
        register()
    backward(model)
    assert seen == [torch.Tensor]
    assert narrow(model) == [True, True, False]
    assert third.grad is None
    plain = plain_gradients()
    assert taken[0].equal(plain[2])
    assert first.grad.dequantize().equal(ScalingTensor.quantize(plain[0] * 2, E4M3).dequantize())
    assert second.grad.dequantize().equal(ScalingTensor.quantize(plain[1] * 0.5, E4M3).dequantize())
    assert casts is not None


def test_a_frozen_parameter_is_hooked_once_it_wants_a_gradient():
    model = net()
    model[0].weight.requires_grad_(False)
    casts = attached(model)
    backward(model)
    assert model[0].weight.grad is None
    model[0].weight.requires_grad_(True)
    model.zero_grad()
    backward(model)
    assert narrow(model) == [False, True, True]
    casts.attach((p, FP8) for p in model.parameters())
    model[1].weight.requires_grad_(False)
    model.zero_grad()
    backward(model)
    assert narrow(model) == [True, False, True]


def test_a_group_is_cast_as_soon_as_it_is_complete(monkeypatch):
    model = net(depth=5)
    monkeypatch.setattr(grad_cast, "GROUP_ELEMENTS", 2 * 32 * 32)
    casts, seen = attached(model), []
    for layer in model:
        layer.weight.register_hook(lambda _: seen.append(narrow(model)))
    backward(model)
    cast = [sum(each) for each in seen]
    assert cast == [0, 0, 2, 2, 4]
    assert all(narrow(model))
    storages = {p.grad.held.payload.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 3
    assert casts is not None


class LiveBytes(TorchDispatchMode):
    """Bytes of the BF16 and FP8 storages that operations have made and that are alive, and the most at a time. FP32 does not count: the
    reference twins compute in it, and kernels do not."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self._alive = 0, 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if type(x) is torch.Tensor and x.dtype != torch.float32:
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self._alive:
                    size = storage.nbytes()
                    self._alive[key] = weakref.ref(storage, lambda _, key=key, size=size: self._freed(key, size))
                    self.live += size
                    self.peak = max(self.peak, self.live)
        return made

    def _freed(self, key: int, size: int) -> None:
        del self._alive[key]
        self.live -= size


def test_the_peak_of_backward_holds_one_group_in_bf16(monkeypatch):
    """Layers are wide and the batch is small, so that gradients are nearly all that backward leaves."""
    width, depth = 256, 16
    elements = width * width
    monkeypatch.setattr(grad_cast, "GROUP_ELEMENTS", 2 * elements)
    peaks = {}
    for formats in (BF16, FP8):
        model = net(width, depth)
        casts = attached(model, formats)
        backward(model)  # casts and caches of the first step
        model.zero_grad()
        gc.collect()
        with LiveBytes() as tally:
            backward(model)
        peaks[formats["grad"]] = tally.peak
        assert casts is not None
    fallen = peaks["bf16"] - peaks["fp8-e4m3"]
    assert peaks["bf16"] > 2 * depth * elements
    assert fallen > (depth - 6) * elements  # half of all gradients, but for the groups that are being cast


# Plain gradients into the optimizer's formats, many at a time: the bits of one at a time.


SHAPES = ((24, 40), (7,), (), (3, 5), (0,), (128, 64))


def gradients(kind: str, device: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [(make(kind if shape else "normal", shape, seed=i) * 2.0 ** (4 * i)).to(device, dtype) for i, shape in enumerate(SHAPES)]


@each_value(fmt=[E4M3, E5M2, FP16], kind=KINDS)
def test_each_gradient_has_the_bits_of_its_own_quantisation(kind, fmt, device):
    gs = [*gradients(kind, device), *gradients(kind, device, torch.float32)]
    cast = GradCast()
    for _ in range(2):  # again, with what is remembered
        for g, found in zip(gs, cast(gs, fmt), strict=True):
            alone = ScalingTensor.quantize(g, fmt)
            assert isinstance(found, ScalingTensor)
            assert (found.dtype, found.format, found.shape) == (g.dtype, fmt, g.shape)
            assert bits(found.payload).equal(bits(alone.payload))
            assert found.scale_inv.equal(alone.scale_inv)


def test_one_that_is_not_finite_is_marked_and_leaves_the_others_alone(device):
    gs = gradients("normal", device)
    gs[0][3, 5], gs[3][0, 0] = float("nan"), float("-inf")
    found = GradCast()(gs, E4M3)
    assert [bool(g.scale_inv.isnan()) for g in found] == [True, False, False, True, False, False]
    assert bits(found[5].payload).equal(bits(ScalingTensor.quantize(gs[5], E4M3).payload))


def test_rows_take_the_scale_of_the_whole_tensor(device):
    whole = make("channel-outlier", (64, 32), device=device)
    halves = [whole[:32], whole[32:] * 0.01]
    amax = TENSORWISE.amax(whole).expand(2).contiguous()
    found = GradCast()(halves, E4M3, amax)
    assert found[0].scale_inv.equal(found[1].scale_inv)
    assert bits(found[0].payload).equal(bits(ScalingTensor.quantize(whole, E4M3).payload[:32]))
