import torch
from torch import nn

from msamp.numerics.formats import E4M3, FP16, FP32
from msamp.numerics.recipe import StateFormats
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.update_batches import update_batches

FORMATS = StateFormats(FP32, FP32, E4M3, FP16)


def test_holdings_of_one_group_one_format_and_one_layout_are_updated_together():
    ps = [nn.Parameter(torch.ones(4, 4)) for _ in range(5)]
    ps[1] = nn.Parameter(torch.ones(4, 4).t()[:, :3])  # not laid out by rows
    ps[2] = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))  # with a master beside it
    groups = [{"params": ps[:4]}, {"params": ps[4:], "lr": 0.5}]
    optimizer = LowPrecisionOptimizer(groups, lr=0.1, formats=FORMATS)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    numbers = {"asked": 0}

    def hyper(group, update) -> torch.Tensor:
        numbers["asked"] += 1
        return torch.tensor(update.numbers(group), dtype=torch.float64)

    batches = list(update_batches(optimizer.holdings(), optimizer.state, hyper))
    assert [batch.indices for batch in batches] == [[0, 3], [1], [2], [4]]
    assert [batch.by_rows for batch in batches] == [True, False, True, True]
    assert [len(batch.weights) for batch in batches] == [0, 0, 1, 0]
    assert [float(batch.hyper[0]) for batch in batches] == [0.1, 0.1, 0.1, 0.5]
    assert numbers["asked"] == 4
    assert all(batch.update.name == "fp32" and batch.grads == [] for batch in batches)
    assert batches[2].masters[0] is optimizer.state[ps[2]]["master"]
    assert batches[0].states["exp_avg"][1] is optimizer.state[ps[3]]["exp_avg"]
