"""What is done to `p.grad` under `no_sync` is done to the sum; nothing is left of what showed it."""

import copy
import gc
import pickle
import warnings
import weakref

import torch
from torch import nn

from helpers.numerics import make
from msamp.numerics.formats import BF16, FP32
from msamp.parallel.data_parallel import grad_sync


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


def test_sums_are_read_edited_and_replaced_where_they_are():
    layer, sync = layer_and_sync()
    x = make("normal", (5, 4)).bfloat16().float()
    with sync.no_sync():
        layer(x).sum().backward()
        untouched = layer.bias.grad
        assert layer.weight.grad.allclose(x.sum(0).expand(3, 4), rtol=0.01)
        layer.weight.grad[0] = 0.0
        layer.bias.grad = layer.bias.grad * 2
        layer(x).sum().backward()
        torch.autograd.grad(layer(x).sum(), layer.weight)  # p.grad is there afterwards
        layer.weight.grad.mul_(0.5)
    kept = layer.weight.grad
    sync.finish()
    assert untouched.equal(torch.full((3,), 5.0))
    assert layer.bias.main_grad.equal(torch.full((3,), 15.0))
    want = x.sum(0) * torch.tensor([[0.5], [1.0], [1.0]])
    assert layer.weight.main_grad.float().allclose(want, rtol=0.02, atol=0.02)
    assert kept.fetched
    sync.clear()
    with sync.no_sync():
        layer(x).sum().backward()
    layer.weight.grad = layer.weight.grad * 3  # replaced after the last backward
    sync.finish()
    assert layer.weight.main_grad.float().allclose(3 * x.sum(0).expand(3, 4), rtol=0.02, atol=0.02)
