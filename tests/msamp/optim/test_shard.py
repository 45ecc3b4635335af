"""What one process updates: copies of rows of any stored state, and a process that updates everything."""

import pytest
import torch
from torch import nn

from helpers.numerics import bits, make
from msamp.numerics.formats import COAT_E4M3, E4M3, FP32
from msamp.numerics.range_expand import quantize_expanded
from msamp.numerics.recipe import FP32_STATES, O2
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.shard import Holding, Shard, gradient
from msamp.optim.states import group_numbers, payload, scale_inv


def test_a_holding_s_part_of_a_state_is_a_copy_of_its_rows():
    x = make("normal", (7, 3))
    for whole in (x, ScalingTensor.quantize(x, E4M3), quantize_expanded(x, COAT_E4M3)):
        part = Holding(x, {}, {}, 0, x[2:5], slice(2, 5)).copy_of(whole)
        assert bits(payload(part)).equal(bits(payload(whole)[2:5]))
        assert (scale_inv(part) is None) == (scale_inv(whole) is None)
        for mine, theirs in zip(group_numbers(part) or (), group_numbers(whole) or (), strict=True):
            assert mine.equal(theirs[2:5])
        before = bits(payload(whole)).clone()
        payload(part).view(torch.uint8).fill_(1)
        assert bits(payload(whole)).equal(before)
        assert Holding(x, {}, {}, 0, x).copy_of(whole) is whole


def test_one_process_updates_whatever_has_a_gradient_in_its_group_s_format():
    ps = [nn.Parameter(make("normal", (4, 4), seed=i)) for i in range(3)]
    optimizer = LowPrecisionOptimizer([{"params": ps[:2], "formats": O2.states}, {"params": ps[2:], "formats": FP32_STATES}])
    assert [(holding.param is p, holding.weight is p) for holding, p in zip(optimizer.holdings(), ps, strict=True)] == [(True, True)] * 3
    ps[1].grad, ps[2].main_grad = torch.ones(4, 4), torch.full((4, 4), 2.0)  # type: ignore[attr-defined]
    ready = optimizer.ready()
    assert [holding.index for holding in ready] == [1, 2]
    assert scale_inv(ready[0].grad) is not None
    assert ready[1].grad.equal(gradient(ps[2]))
    assert type(optimizer.shard) is Shard
    assert optimizer.shard.ranks == 1


def test_a_sparse_gradient_is_refused():
    p = nn.Parameter(torch.ones(4, 2))
    p.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2))
    with pytest.raises(ValueError, match=r"shape \(4, 2\) is sparse; use dense embeddings"):
        LowPrecisionOptimizer([p], formats=FP32_STATES).step()


def test_one_process_gathers_what_it_has():
    ps = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = LowPrecisionOptimizer(ps, formats=FP32_STATES)
    ps[1].grad = torch.ones(2, 2)
    optimizer.step()
    found = optimizer.shard.gather(optimizer.holdings(), optimizer.state)
    assert list(found) == [1]
    assert found[1].keys() == optimizer.state[ps[1]].keys()
    assert FP32.name == optimizer.holdings()[1].group["formats"]["master"]
