"""`torch.set_default_device` and `torch.set_default_dtype` left on while training change no bit."""

import ast
import copy
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import msamp
from helpers.numerics import make, through_a_file
from helpers.short_window import short


@contextmanager
def left_on(default: str | torch.dtype | None) -> Iterator[None]:
    """A default device or dtype, as left on by a script. Whatever takes "meta" for its device has no values: its first use raises."""
    of_dtype = isinstance(default, torch.dtype)
    (torch.set_default_dtype if of_dtype else torch.set_default_device)(default)
    try:
        yield
    finally:
        (torch.set_default_dtype if of_dtype else torch.set_default_device)(torch.float32 if of_dtype else None)


def trained(default: str | torch.dtype | None, recipe: str, settings: dict[str, str]) -> list[torch.Tensor]:
    """The weights after 10 steps, more than a window, with everything that a loop calls in between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
    model = model.bfloat16() if recipe.startswith("collage") else model
    xs = [make("normal", (16, 32), seed).to(model[0].weight.dtype) for seed in range(10)]
    with left_on(default):
        model, its = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), short(recipe, settings), **settings)
        for step, x in enumerate(xs):
            its.zero_grad()
            (model(x) - x).square().mean().backward()
            msamp.clip_grad_norm_(model.parameters(), 1.0)
            if step == 3:
                msamp.lost_updates(its)
                msamp.float_copy(model)(x.float())
            its.step()
            if step == 5:
                states = through_a_file([model.state_dict(), its.state_dict()], map_location="cpu", weights_only=True)
                model.load_state_dict(states[0])
                its.load_state_dict(states[1])
            if step == 7 and not torch.distributed.is_initialized():
                model, its = copy.deepcopy((model, its))
        return [*msamp.plain_state_dict(model, its).values()]


CASES = [("O1", {}), ("O2", {}), ("O3", {}), ("coat", {}), ("fp32", {}), ("bf16", {}), ("collage-plus", {}), ("collage-fp8", {})]
CASES += [("O2", {"fp8_recipe": name}) for name in ("tensorwise", "blockwise", "mxfp8")]
CASES += [("O3", {"master_rounding": "nearest", "moment_rounding": "nearest"})]
NIGHTLY = [("O1", {}), ("bf16", {}), ("collage-plus", {}), ("O2", {"fp8_recipe": "tensorwise"})]


each_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] * (case in NIGHTLY)) for case in CASES], ids=str
)


@pytest.mark.promise("Hosts", "`torch.set_default_device` left on while training changes no bit.")
@each_case
def test_a_default_device_left_on_changes_no_bit(case):
    assert all(a.equal(b) for a, b in zip(trained("meta", *case), trained(None, *case), strict=True))


@pytest.mark.promise("Hosts", "`torch.set_default_dtype` left at BF16 or FP64 while training changes no bit.")
@each_case
def test_a_default_dtype_left_on_changes_no_bit(case):
    want = trained(None, *case)
    for dtype in (torch.bfloat16, torch.float64):
        assert all(a.equal(b) for a, b in zip(trained(dtype, *case), want, strict=True))


FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "eye", "linspace", "rand", "randn", "randint", "randperm", "as_tensor")


def test_every_tensor_that_the_library_makes_names_its_device():
    bare = []
    for file in sorted(pathlib.Path(msamp.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or any(keyword.arg in ("device", None) for keyword in node.keywords):
                continue
            called = node.func
            of_torch = isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "torch" and called.attr in FACTORIES
            if of_torch or (isinstance(called, ast.Name) and called.id in FACTORIES):
                bare.append(f"{file.name}:{node.lineno}")
    assert not bare
