import pytest
import torch
from torch import nn

from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, FP16, FP32
from msamp.numerics.recipe import StateFormats
from msamp.optim.device_copy import DeviceCopy
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.update_batches import KeptAmaxes, update_batches

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


KEPT_AMAXES_FORMATS = StateFormats(FP16, FP32, E4M3, FP16)


def stepped() -> LowPrecisionOptimizer:
    ps = [nn.Parameter(torch.full((4, 4), value)) for value in (1.0, 2.0)]
    optimizer = LowPrecisionOptimizer(ps, lr=0.0, formats=KEPT_AMAXES_FORMATS)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_after_an_update_amaxes_are_read_again_where_somebody_else_has_written():
    optimizer, kept, read = stepped(), KeptAmaxes(), []

    def batches(holdings):
        read.append([holding.index for holding in holdings])
        return optimizer.batches(holdings)

    def amaxes() -> torch.Tensor:
        return kept.of(optimizer.holdings(), optimizer.state, batches, Tables(torch.device("cpu")), 3)

    first = amaxes()
    assert first.shape == (3, 2)
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    assert first[0].tolist() == [float(state["exp_avg"].dequantize().abs().max()) for state in states]
    assert amaxes().equal(first)
    states[1]["exp_avg"].mul_(2.0)
    again = amaxes()
    assert again[0].tolist() == [first[0, 0], 2 * first[0, 1]]
    kept.forget()
    assert amaxes().equal(again)
    assert read == [[0, 1], [], [1], [0, 1]]


def test_what_an_update_has_written_is_not_read_again():
    optimizer, kept, read = stepped(), KeptAmaxes(), []
    kept.of(optimizer.holdings(), optimizer.state, optimizer.batches, Tables(torch.device("cpu")), 3)
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p]["exp_avg"].mul_(2.0)
    kept.written(optimizer.holdings(), optimizer.state)
    kept.take(optimizer.holdings(), optimizer.state, lambda holdings: read.extend(holdings) or ())
    assert read == []


def test_nothing_is_read_before_the_first_step():
    kept = KeptAmaxes()
    kept.take([], {}, lambda _: [][0])
    assert kept.table.numel() == 0


def test_what_a_refresh_has_read_the_captured_step_after_it_does_not_read(monkeypatch):
    """`refresh` runs outside of a CUDA graph, the step inside: it cannot copy the places of stale weights from the host."""
    optimizer, read = stepped(), []
    update = next(iter(optimizer.batches(optimizer.holdings()))).update
    measure = type(update).stored_amaxes
    monkeypatch.setattr(type(update), "stored_amaxes", lambda self, batch: read.append(len(batch.places)) or measure(self, batch))
    first = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        first.mul_(64.0)
    optimizer.refresh()
    assert read == [1]
    optimizer.step()
    assert read == [1]
    master = optimizer.state[first]["master"]
    assert float(master.dequantize().abs().max()) == 64.0


@pytest.mark.parametrize("value", [True, False])
def test_it_is_what_the_device_had_found_when_it_was_asked(value, device):
    found = torch.tensor(value, device=device)
    flag = DeviceCopy(found)
    found.logical_not_()
    assert bool(flag) is value
    assert bool(flag) is value
