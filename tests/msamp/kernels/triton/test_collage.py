"""The Triton Collage update against its twin: under the interpreter here, compiled on a GPU; bit for bit, every update in BF16."""

import copy
import importlib
from dataclasses import replace

import pytest
import torch

from helpers.adamw_inputs import adamw_batch
from helpers.numerics import bits, make, same
from msamp.kernels.reference.adamw import Batch
from msamp.kernels.reference.collage import VARIANTS
from msamp.kernels.reference.collage import collage as twin
from msamp.kernels.tables import Tables
from msamp.numerics import mcf
from msamp.optim import updates

UPDATES = [name for name, variant in VARIANTS.items() if variant.dtype is torch.bfloat16]
SHAPES = [(33, 17), (), (1,), (3, 5, 7), (64, 48), (0, 4), (2051,)]  # small and ragged, some at 16-byte boundaries
HYPER = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def kernel(*args):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.collage").collage(*args)


def batch(update, device, shapes=SHAPES) -> Batch:
    """Tensors in the midst of training, of magnitudes far apart; some weights are 0 and some smaller than their update."""

    def remainders(xs: list[torch.Tensor], size: float, key: str) -> list[torch.Tensor]:
        fmt = {state.key: state.format for state in updates.by_name(update).states}.get(key)
        return [mcf.remainder_payload((x, x * size), fmt.dtype) for x in xs] if fmt else []

    def states(seed: int, size: float, positive: bool = False) -> list[torch.Tensor]:
        made = [make("log-normal" if i % 2 else "normal", shape or (1,), seed + i).view(shape) for i, shape in enumerate(shapes)]
        return [((x.square() if positive else x).to(device) * size * 2.0 ** (i - 3)).bfloat16() for i, x in enumerate(made)]

    weights, vs = states(30, 0.1), states(20, 1e-6, positive=True)
    for weight in weights:
        weight.view(-1)[::7] = 0.0
        weight.view(-1)[1::7] *= 2.0**-12
    return adamw_batch(
        states(0, 1e-3),
        states(10, 1e-3),
        vs,
        weights,
        steps=[torch.tensor(float(7 * i), device=device) for i in range(len(shapes))],
        weight_remainders=remainders(weights, 2.0**-9, "weight_remainder"),
        v_remainders=remainders(vs, -(2.0**-10), "exp_avg_sq_remainder"),
    )


def everything(x: Batch) -> list[torch.Tensor]:
    columns = (x.grads, x.ms, x.vs, x.masters, x.weight_remainders, x.v_remainders, x.steps)
    return [bits(t).clone() for column in columns for t in column]


def run_both(update, device, clip=0.3, usable=True, shapes=SHAPES, steps=2, **changed) -> tuple[list, list, list]:
    """The bits in memory before, after the twin's steps and after the kernel's."""
    ours = batch(update, device, shapes)
    theirs, tables, before = copy.deepcopy(ours), Tables(torch.device(device)), everything(ours)
    hyper = torch.tensor(list({**HYPER, **changed}.values()), dtype=torch.float64, device=device)
    coefficient = None if clip is None else torch.tensor(clip, device=device)
    for _ in range(steps):
        for run, x in ((twin, theirs), (kernel, ours)):
            run(tables, x, hyper, update, coefficient, torch.tensor(usable, device=device))
    return before, everything(theirs), everything(ours)


@pytest.mark.parametrize("update", UPDATES)
def test_as_its_twin_to_the_bit(update, triton_device):
    before, want, got = run_both(update, triton_device)
    assert [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not a.equal(b)] == []
    assert not same(before, want)


SETTINGS = [
    {"weight_decay": 0.0, "clip": None},
    {"beta1": 0.0, "beta2": 0.0},
    {"beta1": 0.5, "beta2": 0.75, "eps": 1e-3},  # step 9: 1 - beta1^9 is a tie of BF16
]


@pytest.mark.parametrize(
    ("update", "settings"),
    [
        pytest.param(update, settings, marks=[pytest.mark.nightly] * (i != j))
        for i, update in enumerate(["kahan", "plus", "fp8"])
        for j, settings in enumerate(SETTINGS)
    ],
    ids=str,
)
def test_every_number_does_what_it_does_in_the_twin(update, settings, triton_device):
    _, want, got = run_both(update, triton_device, **settings, shapes=[(40,), (24,)], steps=5)
    assert same(got, want)


@pytest.mark.parametrize("update", ["a", "plus"])
def test_a_step_that_is_not_usable_leaves_no_trace(update, triton_device):
    before, want, got = run_both(update, triton_device, usable=False)
    assert same(got, before)
    assert same(want, before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("update", ["plus", "fp8"])
def test_every_magnitude_and_what_is_not_finite(update, triton_device):
    every = torch.arange(2**16, dtype=torch.int32, device=triton_device).to(torch.int16).view(torch.bfloat16)
    normal = every[every.float().abs() >= 2.0**-60][: 2**15 + 300 : 7].contiguous()
    x = batch(update, triton_device, [normal.shape])
    x = replace(x, grads=[normal], masters=[normal.flip(0).clone()])
    y, tables = copy.deepcopy(x), Tables(torch.device(triton_device))
    hyper = torch.tensor(list(HYPER.values()), dtype=torch.float64, device=triton_device)
    for run, made in ((twin, x), (kernel, y)):
        run(tables, made, hyper, update, None, torch.tensor(True, device=triton_device))
    for a, b in zip((x.ms, x.vs, x.masters, x.weight_remainders), (y.ms, y.vs, y.masters, y.weight_remainders), strict=True):
        mine, his = a[0].float(), b[0].float()
        assert (mine.isnan() == his.isnan()).all()
        assert bits(mine.nan_to_num()).equal(bits(his.nan_to_num()))


def test_remainders_in_e4m3_beside_weights_of_every_magnitude(triton_device):
    """An update of 0 reads and writes them all and changes no bit; the smallest weights share a unit."""
    every = torch.arange(2**16, dtype=torch.int32, device=triton_device).to(torch.int16).view(torch.bfloat16)
    weight = every[every.isfinite() & (every.abs() >= 2.0**-117)][::13].contiguous()
    ulp = weight.float().abs() * 2.0**-8
    rest = (ulp * make("normal", weight.shape).to(triton_device) * 0.2).clamp(-0.49 * ulp, 0.49 * ulp).bfloat16()
    payload = mcf.remainder_payload((weight, rest * (rest.abs() >= 2.0**-126)), torch.float8_e4m3fn)  # the interpreter has no smaller ones
    x = batch("fp8", triton_device, [weight.shape])
    x = replace(x, masters=[weight.clone()], states=x.states | {"weight_remainder": [payload.clone()]})
    hyper = torch.tensor(list((HYPER | {"lr": 0.0}).values()), dtype=torch.float64, device=triton_device)
    kernel(Tables(torch.device(triton_device)), x, hyper, "fp8", None, torch.tensor(True, device=triton_device))
    assert bits(x.masters[0]).equal(bits(weight))
    assert x.weight_remainders[0].float().equal(payload.float())
    assert len(bits(payload).unique()) > 150


@pytest.mark.gpu
@pytest.mark.parametrize("update", UPDATES)
def test_large_tensors_on_the_gpu(update):
    _, want, got = run_both(update, "cuda", shapes=[(2048, 8192), (6151, 3), (2048,), (50304, 64)])
    shares = [float((a != b).float().mean()) for a, b in zip(got, want, strict=True)]
    assert max(shares) == 0.0, shares
