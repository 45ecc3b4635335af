"""A rehearsed update: stored as the real one stores it, wanted as FP32 states would have it, and without a trace."""

import pytest
import torch
from torch import nn

from helpers.choices import each_value
from helpers.numerics import make
from msamp.numerics import mcf
from msamp.numerics.formats import BF16, E4M3, FP16, FP32, Format
from msamp.numerics.recipe import COAT, COLLAGE_FP8, COLLAGE_PLUS, FP32_STATES, O1, O2, O3, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim import update_error
from msamp.optim.optimizer import LowPrecisionOptimizer
from msamp.optim.update_error import rehearse, rehearse_batches

LEVELS = {
    "O1": (O1.states, FP16),
    "O2": (O2.states, FP16),
    "O3": (O3.states, E4M3),
    "bf16": (FP32_STATES, BF16),
    "fp32": (FP32_STATES, FP32),
}


class LossScale:
    """Never moves."""

    def scale(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(1024.0, device=device)

    def update(self, overflow: torch.Tensor) -> None:
        pass


def bits(x: torch.Tensor) -> bytes:
    plain = [x.payload, x.scale_inv] if isinstance(x, ScalingTensor) else [x]
    return b"".join(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in plain)


def made(formats: StateFormats, weight: Format, device="cpu", **settings) -> tuple[list[nn.Parameter], LowPrecisionOptimizer]:
    ps = []
    for seed, shape in enumerate(((24, 16), (8, 48))):
        x = make("normal", shape, seed=seed, device=device) * 0.1
        ps.append(nn.Parameter(ScalingTensor.quantize(x, weight) if weight.scaled else x.to(weight.dtype)))
    return ps, LowPrecisionOptimizer(ps, lr=1e-2, weight_decay=0.1, formats=formats, **settings)


def grow(ps: list[nn.Parameter], seed: int) -> None:
    for i, p in enumerate(ps):
        p.grad = (make("normal", p.shape, seed=100 * seed + i, device=p.device) * 1e-3).to(p.dtype)


def everything(optimizer: LowPrecisionOptimizer) -> list[bytes]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [bits(t) for p in params for t in (p, *(v for _, v in sorted(optimizer.state[p].items())))]


@each_value(settings=[{}, {"clip_grad": 0.01}, {"clip_grad": 0.01, "loss_scale": LossScale()}], level=LEVELS)
def test_what_is_stored_is_what_the_step_stores_and_nothing_changes(level, settings, device, monkeypatch):
    monkeypatch.setattr(update_error, "ROWS", 100)
    ps, optimizer = made(*LEVELS[level], device, **settings)
    for step in range(3):
        grow(ps, step)
        before = everything(optimizer) if step else []
        told = list(rehearse(optimizer))
        if step == 0:
            assert not told
        else:
            assert everything(optimizer) == before
        optimizer.step()
    for p in ps:
        parts = [r for r in told if r.holding.param is p]
        assert len(parts) > 1
        state = optimizer.state[p]
        real = {"master": state.get("master", p), "m": state["exp_avg"], "v": state["exp_avg_sq"]}
        real |= {"weight": p} if "master" in state else {}
        assert real.keys() == parts[0].stored.keys() == parts[0].wanted.keys()
        for name, tensor in real.items():
            payloads = [r.stored[name].payload if isinstance(tensor, ScalingTensor) else r.stored[name] for r in parts]
            joined = torch.cat([x.view(torch.uint8) for x in payloads]).view(payloads[0].dtype)
            whole = ScalingTensor(joined, parts[0].stored[name].scale_inv) if isinstance(tensor, ScalingTensor) else joined
            assert bits(whole) == bits(tensor), name


@pytest.mark.parametrize("recipe", [COLLAGE_PLUS, COLLAGE_FP8], ids=lambda recipe: recipe.name)
def test_pairs_are_rehearsed_as_their_values(recipe, device):
    ps, optimizer = made(recipe.states, BF16, device)
    for step in range(3):
        grow(ps, step)
        before = everything(optimizer) if step else []
        told = list(rehearse(optimizer))
        assert not step or everything(optimizer) == before
        optimizer.step()
    for one, p in zip(told, ps, strict=True):
        state = optimizer.state[p]
        for name, first, key in (("master", p, "weight_remainder"), ("v", state["exp_avg_sq"], "exp_avg_sq_remainder")):
            x, y = mcf.load_pair(first.detach(), state[key])
            assert one.stored[name].equal(x.float() + y.float())
            assert y.any()


# To nearest: a sample's rows are counted from 0, so that stochastic rounding draws other thresholds for them.
NEAREST = {name: (states.varied(master_rounding="nearest", moment_rounding="nearest"), fmt) for name, (states, fmt) in LEVELS.items()}
SAMPLED = {**NEAREST, "coat": (COAT.states, E4M3), "plus": (COLLAGE_PLUS.states, BF16), "collage-fp8": (COLLAGE_FP8.states, BF16)}


@pytest.mark.parametrize("level", SAMPLED)
def test_a_sample_is_rows_of_the_whole_update_to_the_bit(level, device, monkeypatch):
    """Of (24, 16) every sixth row, of (8, 48) one; a sample of one row more than fits is two launches."""
    monkeypatch.setattr(update_error, "SAMPLED", 100)
    ps, optimizer = made(*SAMPLED[level], device, clip_grad=1e-2)
    more = [nn.Parameter(p.detach().clone()) for p in ps]
    optimizer.add_param_group({"params": more})
    for step in range(3):
        grow([*ps, *more], step)
        if step < 2:
            optimizer.step()
    before = everything(optimizer)
    whole = {holding.index: (old, exact, stored) for holding, old, exact, stored in one_by_one(optimizer, None)}
    sampled = list(one_by_one(optimizer, 64))
    assert everything(optimizer) == before
    assert sorted(holding.index for holding, *_ in sampled) == [0, 1, 2, 3]
    for holding, *found in sampled:
        rows = slice(0, 24, 6) if holding.param.shape[0] == 24 else slice(0, 1)
        for part, of_whole in zip(found, whole[holding.index], strict=True):
            assert part.equal(of_whole[rows])


def one_by_one(optimizer: LowPrecisionOptimizer, sample: int | None):
    """Each holding with its masters before, exact and as stored."""
    for both in rehearse_batches(optimizer, sample):
        yield from zip(both.holdings, both.before, both.exact.masters, both.masters(), strict=True)
