"""Marks in `p.grad` show when a gradient was cleared; nothing is left of them afterwards."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from helpers.numerics import make
from msamp.comm.accumulate import GradMarks
from msamp.numerics.formats import BF16, E4M3, FP32
from msamp.numerics.tensor import ScalingTensor
from msamp.parallel.data_parallel import grad_sync


def parameters() -> dict[str, nn.Parameter]:
    return {
        "fp32": nn.Parameter(make("normal", (4, 8))),
        "bf16": nn.Parameter(make("normal", (8,)).bfloat16()),
        "fp8": nn.Parameter(ScalingTensor.quantize(make("normal", (4, 8)), E4M3)),
        "empty": nn.Parameter(torch.zeros(0, 3)),
    }


every_kind = pytest.mark.parametrize("kind", list(parameters()))


@every_kind
def test_what_clears_gradients_is_noticed(kind):
    p, marks = parameters()[kind], GradMarks()
    module = nn.ParameterList([p])
    for clear in (module.zero_grad, torch.optim.SGD([p]).zero_grad, lambda: setattr(p, "grad", None)):
        marks.put(p)
        clear()
        assert marks.lift(p)
        assert p.grad is None
    for clear in (module.zero_grad, torch.optim.SGD([p], foreach=True).zero_grad):
        marks.put(p)
        clear(set_to_none=False)
        assert marks.lift(p) == (p.numel() > 0)
        assert p.grad is None
    marks.put(p)
    p.grad = own = torch.zeros(p.shape, dtype=p.dtype)
    assert marks.lift(p)
    assert p.grad is own


def layer_and_sync():
    layer = nn.Linear(4, 3)
    return layer, grad_sync(layer, {layer.weight: BF16, layer.bias: FP32})


def test_sums_that_were_cleared_are_dropped_and_others_are_not():
    layer, sync = layer_and_sync()
    x = make("normal", (5, 4))
    with sync.no_sync():
        (layer(x) * 100).sum().backward()
        layer.bias.grad = None
        layer(x).sum().backward()
    layer.weight.grad.zero_()
    layer(x).sum().backward()
    sync.finish()
    assert layer.bias.main_grad.equal(torch.full((3,), 10.0))
    assert layer.weight.main_grad.float().allclose(x.sum(0).expand(3, 4), rtol=0.01, atol=0.01)
    assert layer.weight.grad is None
    sync.clear()
    with sync.no_sync():
        layer(x).sum().backward()
        torch.autograd.grad(layer(x).sum(), layer.bias)  # gives a gradient to the caller alone
    layer.weight.grad = None
    sync.finish()
    assert layer.weight.main_grad is None
    assert layer.bias.main_grad.equal(torch.full((3,), 5.0))


def test_copies_files_and_the_collector_do_not_meet_the_hooks():
    layer, sync = layer_and_sync()
    with sync.no_sync():
        layer(make("normal", (5, 4))).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            other(make("normal", (5, 4))).sum().backward()
            assert other.bias.grad.equal(torch.full((3,), 5.0))
    sync.clear()
    assert layer.bias.grad is None
    gone = weakref.ref(layer)
    del layer, sync, other
    gc.collect()
    assert gone() is None
