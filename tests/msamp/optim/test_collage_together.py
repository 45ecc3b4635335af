"""CollageAdamW's one launch over a group's parameters against the same update, one parameter after the other."""

import copy

import pytest
import torch

from msamp.optim.collage import CollageAdamW

ONE_KERNEL = ("a", "light", "plus", "fp8", "kahan")
SHAPES = ((33, 48), (64,), (0, 4), (16, 16), (5,), (7, 3))


def groups(device: torch.device) -> list[dict]:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape).bfloat16().to(device)) for shape in SHAPES]
    weights[3].data = weights[3].data.t()  # not laid out by rows
    return [{"params": weights[:4]}, {"params": weights[4:], "lr": 1e-2, "weight_decay": 0.0}]


def train(optimizer: CollageAdamW, steps: range) -> None:
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        torch.manual_seed(step)
        for i, p in enumerate(weights):
            p.grad = None if (step + i) % 5 == 0 else (torch.randn(p.shape) * 10.0 ** (i - 3)).bfloat16().to(p.device)
        optimizer.step()


def everything(optimizer: CollageAdamW) -> list[torch.Tensor]:
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    return [x.detach().cpu().float() for p in weights for x in (p, *optimizer.state[p].values())]


@pytest.mark.parametrize("variant", ONE_KERNEL)
def test_one_launch_changes_no_bit(variant: str, device: torch.device):
    together = CollageAdamW(groups(device), betas=(0.9, 0.999), variant=variant)
    alone = CollageAdamW(groups(torch.device("cpu")), betas=(0.9, 0.999), variant=variant, keep_update=True)
    for steps in (range(8), range(8, 12)):
        train(together, steps)
        train(alone, steps)
        for a, b in zip(everything(together), everything(alone), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        together.param_groups[0]["lr"] = alone.param_groups[0]["lr"] = 3e-4  # schedules change what the launch reads


def test_a_copy_has_tables_of_its_own_and_goes_on_to_the_same_bits(device: torch.device):
    first = CollageAdamW(groups(device))
    train(first, range(3))
    second = copy.deepcopy(first)
    assert second._tables == {}
    train(first, range(3, 6))
    train(second, range(3, 6))
    for a, b in zip(everything(first), everything(second), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_only_what_asks_for_more_goes_one_by_one(monkeypatch: pytest.MonkeyPatch):
    alone = []
    monkeypatch.setattr(CollageAdamW, "_step_alone", lambda self, p, g, group: alone.append(group["variant"]))
    for options in ({}, {"weight_sum": "two-sum"}, {"eps_inside_root": True}, {"keep_update": True}, {"variant": "d"}):
        optimizer = CollageAdamW([torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))], **options)
        train(optimizer, range(1, 2))
    assert alone == ["plus", "plus", "plus", "d"]
