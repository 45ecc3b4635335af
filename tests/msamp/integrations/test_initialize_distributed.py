"""`msamp.initialize` on several processes: the loop of one process, and its results."""

import re

import pytest
import torch
import torch.distributed
from torch import nn

import msamp
from helpers import dist
from helpers.numerics import bytes_of, same
from msamp.nn.linear import FP8Linear
from msamp.numerics.recipe import by_name
from msamp.numerics.scaling import Delayed

LEVELS = ("O1", "O2", "O3")
STEPS = 8
WINDOW = 3  # of delayed scaling: both of its phases are seen
every_level = pytest.mark.parametrize("level", LEVELS)


class Net(nn.Module):
    """An MLP with a layer that no batch uses, a frozen one and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 16))
        self.unused = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return y + 0.01 * self.frozen(y) + self.shift


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a step's 64 examples, and what a fixed map makes of them."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(64, 16, generator=generator) / 8
    x = torch.randn(64, 64, generator=generator.manual_seed(step + 2))
    rank, ranks = dist.place()
    return tuple(part.chunk(ranks)[rank] for part in (x, torch.tanh(x @ teacher)))


def wanting(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def values(model: nn.Module) -> list[torch.Tensor]:
    """All that a model keeps, scaling histories included."""
    return bytes_of(model.state_dict().values())


def train(level: str, *, micro_batches: int = 1, **options) -> dict:
    """An ordinary loop over `batch`: losses of the whole batch, what the model has become, and the optimizer's state."""
    rank, ranks = dist.place()
    model = Net(rank * 100).bfloat16().float()  # as a checkpoint's weights are
    model, optimizer = msamp.initialize(model, wanting(model), by_name(level).with_scaling(Delayed(WINDOW)), **options)
    start = values(model)
    losses = []
    for step in range(STEPS):
        micro = list(zip(*(whole.chunk(micro_batches) for whole in batch(step)), strict=True))

        def backward(x: torch.Tensor, y: torch.Tensor, count: int = len(micro)) -> torch.Tensor:
            loss = (model(x) - y).square().mean() / count
            loss.backward()
            return loss.detach()

        with optimizer.no_sync():
            loss = sum(backward(*part) for part in micro[:-1])
        loss = loss + backward(*micro[-1])
        assert ranks == 1 or not any(getattr(p.grad, "fetched", False) for p in model.parameters())  # nobody looked
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            torch.distributed.all_reduce(loss)
        losses.append(float(loss) / ranks)
    sync, state = optimizer.grad_sync, optimizer.state_dict()["state"]
    return {
        "losses": torch.tensor(losses),
        "start": start,
        "model": values(model),
        "state": bytes_of(state[i][key] for i in sorted(state) for key in sorted(state[i])),
        "bytes": sync and sync.sent.total("weight"),
    }


def every_case() -> dict:
    """What the tests below look at, from one set of processes."""
    cases = {(level, zero): train(level, zero=zero) for level in LEVELS for zero in (False, True)}
    cases["accumulated"] = {zero: train("O2", zero=zero, micro_batches=4) for zero in (False, True)}
    cases["nan"] = bad_gradient()
    cases["refusals"] = refusals()
    return cases


def bad_gradient() -> tuple[bool, int]:
    """A NaN on the last rank only: (nothing changed, steps skipped) on this one."""
    rank, ranks = dist.place()
    model, optimizer = msamp.initialize(net := Net(), wanting(net), "O3")
    before = bytes_of(model.parameters())
    x, y = batch(0)
    ((model(x) - y).square().mean() * (float("nan") if rank == ranks - 1 else 1.0)).backward()
    optimizer.step()
    return same(before, bytes_of(model.parameters())), optimizer.skipped_steps


def refusals() -> dict[str, str]:
    """What is said to bad input; nothing is converted."""
    rank, _ = dist.place()
    said = {}

    def refused(name: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, level: str = "O2", **options) -> None:
        with pytest.raises(ValueError, match=r"\w") as raised:
            msamp.initialize(model, optimizer, level, **options)
        said[name] = str(raised.value)
        assert not any(isinstance(m, FP8Linear) for m in model.modules())

    net = Net()
    refused("level", net, level="O4")
    refused("optimizer", net, torch.optim.Adagrad(net.parameters(), lr=0.1))
    refused("stray", net, torch.optim.AdamW([*net.parameters(), nn.Parameter(torch.zeros(3))]))
    refused("shape", nn.Linear(32 + 16 * rank, 16))
    refused("frozen", nn.Linear(32, 16).requires_grad_(rank == 0))
    with torch.no_grad():
        net.body[3].weight[0] = float("nan") if rank == 0 else 0.0  # of which every rank hears: rank 0's weights are everyone's
    refused("nan", net)
    first = torch.distributed.new_group([0])
    if rank == 0:
        assert msamp.initialize(alone := Net(), wanting(alone), group=first)[1].grad_sync is None
    else:
        refused("group", Net(), group=first)
    model, optimizer = msamp.initialize(Net())
    x, _ = batch(0)
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"\w") as raised:
        model(x).sum().backward()
    said["twice"] = str(raised.value)
    del optimizer
    return said


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return dist.run(every_case, 2, timeout=800)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    return {level: train(level) for level in LEVELS}


every_way = pytest.mark.parametrize("zero", [False, True], ids=["all states", "zero"])


@every_level
@every_way
def test_ranks_start_from_the_first_one_s_model_and_stay_equal(ranks, alone, level, zero):
    first, second = (rank[level, zero] for rank in ranks)
    assert same(first["start"], alone[level]["start"])
    assert same(second["start"], alone[level]["start"])
    assert same(first["model"], second["model"])


@every_level
@every_way
def test_the_loss_falls_as_on_one_process(ranks, alone, level, zero):
    want, got = alone[level]["losses"], ranks[0][level, zero]["losses"]
    assert want[-1] < 0.5 * want[0]
    assert torch.allclose(got, want, rtol=0.03), "0.006 to 0.022 over eight draws of `off_ties`"


@every_level
def test_zero_is_the_same_to_the_bit(ranks, level):
    off, on = (ranks[0][level, zero] for zero in (False, True))
    assert off["losses"].equal(on["losses"])
    assert same(off["model"], on["model"])
    assert same(off["state"], on["state"])
    assert off["bytes"] > 0
    assert not ranks[1][level, True]["state"]  # the first rank has it all


@every_way
def test_micro_batches_under_no_sync_are_one_step(ranks, zero):
    whole, accumulated = ranks[0]["O2", zero], ranks[0]["accumulated"][zero]
    assert torch.allclose(accumulated["losses"], whole["losses"], rtol=0.02)
    assert accumulated["bytes"] == whole["bytes"]
    assert same(accumulated["model"], ranks[1]["accumulated"][zero]["model"])


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks):
    assert [rank["nan"] for rank in ranks] == [(True, 1)] * 2


@pytest.mark.parametrize(("bad", "text"), [
    ("level", r"precision 'O4' is unknown; choose one of fp32, .*O1, O2, O3"),
    ("optimizer", r"Adagrad; accepted are torch\.optim\.AdamW"),
    ("stray", r"1 of the optimizer's 13 parameters are not in this model.*build one optimizer per model"),
    ("shape", r"ranks 0 and 1 of the group have different models \(.*weight \(16, 32\) torch\.float32.*build the same one on every rank"),
    ("frozen", r"different models \(.*weight \(16, 32\) torch\.float32, no gradient"),
    ("nan", r"body\.3\.weight holds 128 values that are NaN or infinite"),
    ("twice", r"got a second gradient in one step.*run every backward of a step but the last under no_sync\(\)"),
])  # fmt: skip
def test_bad_input_is_refused_on_every_rank(ranks, bad, text):
    for rank in ranks:
        assert re.search(text, rank["refusals"][bad])


def test_a_rank_outside_the_group_is_refused(ranks):
    assert ranks[1]["refusals"]["group"] == "rank 1 is not in the given group; pass the group of its own data-parallel ranks"
