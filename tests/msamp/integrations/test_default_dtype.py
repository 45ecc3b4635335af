"""`torch.set_default_dtype` left on while training changes no bit."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import msamp
from helpers.numerics import make
from helpers.short_window import short


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(dtype: torch.dtype, recipe: str, **settings: str) -> list[torch.Tensor]:
    """The weights after 10 steps, more than a window, with everything that a loop calls in between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
    model = model.bfloat16() if recipe.startswith("collage") else model
    first = model[0].weight.dtype
    xs = [make("normal", (16, 32), seed).to(first) for seed in range(10)]
    with default_dtype(dtype):
        model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), short(recipe, settings), **settings)
        for step, x in enumerate(xs):
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            msamp.clip_grad_norm_(model.parameters(), 1.0)
            if step == 3:
                msamp.lost_updates(optimizer)
            optimizer.step()
            if step == 5:
                states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            if step == 7 and not torch.distributed.is_initialized():
                model, optimizer = copy.deepcopy((model, optimizer))
        return [*msamp.plain_state_dict(model, optimizer).values()]


CASES = [("O1", {}), ("O2", {}), ("O3", {}), ("coat", {}), ("fp32", {}), ("bf16", {}), ("collage-plus", {}), ("collage-fp8", {})]
CASES += [("O2", {"fp8_recipe": name}) for name in ("tensorwise", "blockwise", "mxfp8")]
CASES += [("O3", {"master_rounding": "nearest", "moment_rounding": "nearest"})]
NIGHTLY = [("O1", {}), ("bf16", {}), ("collage-plus", {}), ("O2", {"fp8_recipe": "tensorwise"})]


@pytest.mark.promise("Hosts", "`torch.set_default_dtype` left at BF16 or FP64 while training changes no bit.")
@pytest.mark.parametrize(
    ("recipe", "settings"), [pytest.param(*case, marks=[pytest.mark.nightly] * (case in NIGHTLY)) for case in CASES], ids=str
)
def test_a_default_dtype_left_on_changes_no_bit(recipe, settings):
    want = trained(torch.float32, recipe, **settings)
    for dtype in (torch.bfloat16, torch.float64):
        assert all(a.equal(b) for a, b in zip(trained(dtype, recipe, **settings), want, strict=True))
