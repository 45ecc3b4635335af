"""The optimizer of a loop of one's own: copies, other optimizers and schedulers beside it, groups added later, several processes."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed
from torch import nn

import msamp
from helpers import dist
from helpers.mlp_loop import adamw
from helpers.numerics import through_a_file
from msamp.numerics.tensor import ScalingTensor

LEVELS = ("O1", "O2", "O3")
every_level = pytest.mark.parametrize("level", LEVELS)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(64, 32, generator=generator)
        loss = (model(x) - x[:, :16]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------------------------------------------------- copies


def pickled(pair):
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.promise("Optimizer states", "A deepcopy or pickle on one process continues bit for bit.")
@every_level
@pytest.mark.parametrize("how", [copy.deepcopy, pickled, through_a_file])
def test_a_copy_of_model_and_optimizer_trains_on_as_they_do(level, how):
    first, optimizer = msamp.initialize(model := net(), adamw(model), level)
    train(first, optimizer, range(3))
    other, second = how((first, optimizer))
    assert train(first, optimizer, range(3, 8)) == train(other, second, range(3, 8))
    assert first[0].scaling.seen == other[0].scaling.seen == 8
    assert other[0].scaling.amax.eq(0).all()
    with second.no_sync():
        assert second.grad_sync is None


# ------------------------------------------------------------------------------------------------- loaded weights (masters)


# ---------------------------------------------------------------------------------------------------- the optimizer given


@pytest.mark.promise("Optimizer states", "After `msamp.initialize` the given optimizer's `step` raises.")
def test_the_given_optimizer_s_step_raises_and_names_the_way_out():
    old = adamw(model := net())
    low, optimizer = msamp.initialize(model, old)
    before = low[2].weight.detach().clone()
    low(torch.randn(4, 32)).sum().backward()
    with pytest.raises(ValueError, match=r"was replaced by msamp\.initialize .*step the one that it returned"):
        old.step()
    assert low[2].weight.equal(before)
    old.zero_grad()  # whose parameters are the model's
    assert all(p.grad is None for p in low.parameters())
    optimizer.step()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_scheduler_of_the_given_optimizer_sets_the_rates_of_the_returned_one(when, loaded):
    old = adamw(model := net(), lr=torch.tensor(1.0) if loaded else 1.0)
    rate = old.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.ExponentialLR(old, 0.5) if when == "before" else None
    low, optimizer = msamp.initialize(model, old)
    schedule = schedule or torch.optim.lr_scheduler.ExponentialLR(old, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate, "a tensor that its owner fills"
    if loaded:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for want in (0.5, 0.25):
            train(low, optimizer, range(1))
            schedule.step()
            assert [group["lr"] for group in optimizer.param_groups] == [want]


@pytest.mark.promise("Optimizer states", "Parameter groups stay as the caller built them.")
def test_groups_stay_as_they_are_so_that_a_lambda_each_is_enough():
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": [*model[2].parameters(), *model[3].parameters()], "weight_decay": 0.0}]
    low, optimizer = msamp.initialize(model, torch.optim.AdamW(groups, lr=1.0))
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(p) for p in low[0].parameters()],
        [id(p) for i in (2, 3) for p in low[i].parameters()],
    ]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.1**step])
    train(low, optimizer, range(1))
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    optimizer.param_groups[1]["params"].pop()
    with pytest.raises(ValueError, match=r"has 3 parameters and began with 4: its list was edited; call optimizer\.add_param_group"):
        optimizer.step()


# ------------------------------------------------------------------------------------------------------------- groups


# ------------------------------------------------------------------------------------------------------ several processes


def loops() -> dict[str, object]:
    """What happens on each of several ranks to gradients that are dropped."""
    rank, found = torch.distributed.get_rank(), {}
    for zero in (False, True):
        results = []
        for spoilt in (False, True):
            low, optimizer = msamp.initialize(model := net(), adamw(model), "O2", zero=zero)
            train(low, optimizer, range(2))
            if spoilt:
                # All of it, a part on one rank alone, and a micro-batch that has not left.
                (low(torch.randn(4, 32)).sum() * 1e6).backward()
                optimizer.zero_grad()
                (low(torch.randn(4, 32)).sum() if rank else low[0](torch.randn(4, 32)).sum()).backward()
                optimizer.zero_grad()
                with optimizer.no_sync():
                    low(torch.randn(4, 32)).sum().backward()
                    optimizer.zero_grad()
                    low(torch.randn(4, 32)).sum().backward()
                    assert all(p.main_grad is None for p in low.parameters())
                optimizer.zero_grad()
                low.zero_grad()
            # Scales have seen what the dropped micro-batches computed, so weights are compared where they are not used.
            for layer in low.modules():
                if hasattr(layer, "amax"):
                    layer.amax.zero_()
            results.append(train(low, optimizer, range(2, 5)))
        found[f"zero {zero}"] = results
        try:
            copy.deepcopy(optimizer)
        except ValueError as error:
            found["copy"] = str(error)
        low(torch.randn(4, 32)).sum().backward()
        low.zero_grad()
        try:
            low(torch.randn(4, 32)).sum().backward()
        except ValueError as error:
            found["the model's zero_grad"] = str(error)
    return found


@pytest.mark.promise("Hosts", "`optimizer.zero_grad()` drops gradients already sent; a backward after `model.zero_grad()` is refused.")
def test_zero_grad_drops_gradients_that_have_left():
    for found in dist.run(loops, 2):
        for zero in (False, True):
            plain, spoilt = found[f"zero {zero}"]
            assert plain == spoilt
        assert "cannot be copied or pickled" in found["copy"]
        assert "(the optimizer's zero_grad() does; the model's cannot)" in found["the model's zero_grad"]
        assert "save state_dict(), and load it into an optimizer that msamp.initialize returns" in found["copy"]


def to_none(model: nn.Module) -> None:
    model.zero_grad()


def to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def of_a_part(model: nn.Module) -> None:
    model[0].zero_grad()
    model[2:].zero_grad()


CLEARINGS = {"to none": to_none, "to zero": to_zero, "by hand": by_hand, "of a part": of_a_part}


def one_step_after(clear, zero: bool) -> dict[str, object]:
    """One rank's weights after a step of which `clear` dropped the first micro-batches, if it is given."""
    low, optimizer = msamp.initialize(model := net(), adamw(model), "O2", zero=zero, clip_grad=1.0)
    rank = torch.distributed.get_rank()
    x = torch.randn(2, 3, 16, 32, generator=torch.Generator().manual_seed(0))[rank]
    if clear is not None:
        with optimizer.no_sync():
            for _ in range(2):
                (low(x[0]).square().sum() * 1e3).backward()
        assert not any(p.grad.fetched for p in low.parameters())
        clear(low)
        for layer in low.modules():
            if hasattr(layer, "amax"):
                layer.amax.zero_()
    with optimizer.no_sync():
        low(x[1]).square().mean().backward()
    low(x[2]).square().mean().backward()
    optimizer.step()
    return {"norm": float(optimizer.grad_norm), "weights": [msamp.fp32_values(p).clone() for p in low.parameters()]}


def clearings() -> dict[tuple[str, bool], dict[str, object]]:
    found = {(name, zero): one_step_after(clear, zero) for zero in (False, True) for name, clear in CLEARINGS.items()}
    found |= {("nothing", zero): one_step_after(None, zero) for zero in (False, True)}
    low, optimizer = msamp.initialize(model := net(), adamw(model), "O2")
    before = [msamp.fp32_values(p).clone() for p in low.parameters()]
    with optimizer.no_sync():
        low(torch.randn(4, 32)).sum().backward()
    low.zero_grad()
    optimizer.step()
    after = [msamp.fp32_values(p) for p in low.parameters()]
    return found | {"a step of nothing": all(a.equal(b) for a, b in zip(before, after, strict=True))}


@pytest.mark.promise("Hosts", "`model.zero_grad()` and `p.grad = None` drop micro-batches that ran under `no_sync()`.")
def test_the_model_s_zero_grad_drops_micro_batches_that_have_not_left():
    for found in dist.run(clearings, 2):
        assert found["a step of nothing"]
        for zero in (False, True):
            want = found["nothing", zero]
            for name in CLEARINGS:
                got = found[name, zero]
                assert got["norm"] == want["norm"]
                assert all(a.equal(b) for a, b in zip(got["weights"], want["weights"], strict=True))


# --------------------------------------------------------------------------------------------------------------- clipping


def clipped(how: str, zero: bool) -> dict[str, object]:
    """One rank's weights after steps whose gradients are clipped, and the first norm that the clipping tells."""
    low, optimizer = msamp.initialize(model := net(), adamw(model), "O3", zero=zero, clip_grad=0.05 if how == "clip_grad" else None)
    rank, norms = torch.distributed.get_rank(), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            x = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(step))[rank]
            (low(x) - x[:, :16]).square().mean().backward()
            if how == "ours":
                norms.append(float(msamp.clip_grad_norm_(low.parameters(), 0.05)))
            if how == "torch's":
                norms.append(float(nn.utils.clip_grad_norm_(low.parameters(), 0.05)))
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
            assert all(p.grad is None and p.main_grad is None for p in low.parameters())
    return {
        "norm": norms[0],
        "weights": [p.dequantize() if isinstance(p, ScalingTensor) else p.detach() for p in low.parameters()],
        "told": [str(each.message) for each in told if "clip" in str(each.message)],
    }


def clippings() -> dict[tuple[str, bool], dict[str, object]]:
    hows = [(how, zero) for how in ("clip_grad", "ours", "torch's", "nothing") for zero in (False, True)]
    low, first = msamp.initialize(model := net(), adamw(model), "O3")
    other, second = msamp.initialize(model := net(), adamw(model), "O3")
    assert first is not second
    with pytest.raises(ValueError, match="2 optimizers that average gradients separately"):
        msamp.clip_grad_norm_([*low.parameters(), *other.parameters()], 1.0)
    return {each: clipped(*each) for each in hows}


@pytest.mark.promise("Hosts", "On several processes torch's and our `clip_grad_norm_` clip the averaged gradient, with and without ZeRO.")
def test_the_average_is_clipped_on_several_processes_by_us_and_by_torch():
    first, second = dist.run(clippings, 2)
    for zero in (False, True):
        want, free = first["clip_grad", zero], first["nothing", zero]
        assert want["norm"] > 0.3
        assert not all(a.equal(b) for a, b in zip(want["weights"], free["weights"], strict=True))
        for how in ("ours", "torch's"):
            for rank in (first, second):
                got = rank[how, zero]
                assert got["norm"] == pytest.approx(want["norm"], rel=1e-6)
                assert all(torch.allclose(a, b, rtol=0.05, atol=2e-4) for a, b in zip(want["weights"], got["weights"], strict=True))
        assert all(rank[how, zero]["told"] == [] for rank in (first, second) for how in ("ours", "torch's", "clip_grad", "nothing"))


@pytest.mark.promise("Hosts", "DistributedDataParallel around a converted model is refused by name with the fix.")
def test_distributed_data_parallel_around_the_model_is_refused():
    low, optimizer = msamp.initialize(net())
    with pytest.raises(ValueError, match=r"averages the gradients itself; use the model without a wrapper.*accelerate\.Accelerator"):
        nn.parallel.DistributedDataParallel(low, process_group=object())
    copy.deepcopy((low, optimizer))
