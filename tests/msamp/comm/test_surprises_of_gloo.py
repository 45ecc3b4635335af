"""What gloo does by the position of a rank: MAX keeps a NaN of rank 0 alone, sums of BF16 depend on the order. A loop must not notice."""

import torch
from torch import nn

import msamp
from helpers import dist


def skipped() -> list[tuple[int, bool]]:
    """Of a NaN in the gradient of each rank in turn: the count of skipped steps, and whether a weight changed."""
    found = []
    for bad in range(torch.distributed.get_world_size()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), "O2")
        before = msamp.fp32_values(model[0].weight).clone()
        factor = float("nan") if torch.distributed.get_rank() == bad else 1.0
        (model(torch.ones(4, 32)).square().mean() * factor).backward()
        optimizer.step()
        found.append((optimizer.skipped_steps, not before.equal(msamp.fp32_values(model[0].weight))))
    return found


def test_a_nan_of_any_rank_skips_the_step_of_all():
    assert dist.run(skipped, 3) == [[(1, False)] * 3] * 3


def averages() -> list[float]:
    """The average of 256, 1, 1 and 1, with the 256 on each rank in turn, of gradients that are sent in BF16."""
    found = []
    for large in range(torch.distributed.get_world_size()):
        torch.manual_seed(0)
        model = nn.Linear(32, 32, bias=False)
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), "O2", grad_format="bf16")
        (model(torch.ones(1, 32)).sum() * (256.0 if torch.distributed.get_rank() == large else 1.0)).backward()
        optimizer.synchronize()
        found.append(float(model.weight.grad.float().mean()))
    return found


def test_a_sum_of_bf16_gradients_does_not_depend_on_which_rank_has_the_large_one():
    found = dist.run(averages, 4)
    assert len({average for rank in found for average in rank}) == 1
    assert abs(found[0][0] - 259 / 4) <= 0.25  # the average is rounded once, not each partial sum
