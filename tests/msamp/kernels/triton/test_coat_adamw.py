"""The Triton AdamW with COAT's moments against its twin: under the interpreter here, compiled on a GPU.

Powers, roots, quotients and logarithms of torch and Triton differ in their last places, so a code may be the next one where the exact
value is midway between two; everything else, and states in other formats, come from the same arithmetic.
"""

import copy
import importlib

import pytest
import torch

from helpers.adamw_inputs import HYPER, amaxes_of, everything, hyper, in_training, run_each, values
from helpers.choices import every_pair
from helpers.numerics import COAT_STEP, codes, make
from msamp.kernels.reference.adamw import Batch
from msamp.kernels.reference.coat_adamw import coat_adamw as twin
from msamp.kernels.reference.store import Rounding
from msamp.kernels.tables import Tables
from msamp.numerics.formats import BF16, COAT_E4M3, COAT_E5M2, E4M3, E5M2, FP16, FP32, PLAIN_FP16, Format
from msamp.numerics.range_expand import STATE_GROUP, Expanded, quantize_expanded
from msamp.numerics.recipe import StateFormats
from msamp.numerics.tensor import ScalingTensor

# Rows of full groups, with a short one, unaligned ones; vectors, a number, nothing.
SHAPES = [(9, 17), (), (1,), (3, 2, 144), (8, 256), (0, 4), (4, 0), (259,), (70, 30)]
# Full groups alone, for which the kernel knows where each is: more than one program has, and an odd number.
FULL = [(10, 1152), (384,), (3, 2, 128), (0, 128)]
# States, and the weight's format where it is not its own master.
FORMATS: dict[str, tuple[StateFormats, Format | None]] = {
    "fp32": (StateFormats(FP32, FP32, COAT_E4M3, COAT_E4M3), None),
    "O0": (StateFormats(FP32, BF16, COAT_E4M3, COAT_E4M3), BF16),
    "fp16-amp": (StateFormats(m=COAT_E4M3, v=COAT_E4M3), PLAIN_FP16),
    "O2": (StateFormats(FP16, E4M3, COAT_E4M3, COAT_E4M3), None),
    "O3, v in e5m2": (StateFormats(FP16, E4M3, COAT_E4M3, COAT_E5M2), E4M3),
    "m alone": (StateFormats(FP16, E4M3, COAT_E5M2, FP16), None),
    "v alone": (StateFormats(FP16, BF16, E4M3, COAT_E5M2), BF16),
    "v beside a plain m": (StateFormats(BF16, E5M2, BF16, COAT_E4M3), FP16),
}
# The logarithm of 0, and values that are not finite, are meant.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")


def kernel(*args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.coat_adamw").coat_adamw(*args, **flags)


def run_both(name, device, shapes=SHAPES, alone=False, **options) -> list[tuple[Batch, torch.Tensor]]:
    """The batch before, after the twin's step and, unless it is `alone`, after the kernel's, each with the amaxes kept."""
    return run_each([twin] if alone else [twin, kernel], in_training(*FORMATS[name], device, shapes), device, **options)


def agree(ours: tuple[Batch, torch.Tensor], theirs: tuple[Batch, torch.Tensor]) -> None:
    """Assert that states agree within COAT_STEP."""
    elements = off = groups = moved = 0
    for column in ("ms", "vs", "masters", "weights"):
        for a, b in zip(getattr(ours[0], column), getattr(theirs[0], column), strict=True):
            if isinstance(a, Expanded):
                assert torch.allclose(a.max, b.max, rtol=COAT_STEP.numbers, atol=0), column
                groups, moved = groups + a.k.numel(), moved + int(((a.k - b.k).abs() > 1e-4 * b.k).sum())
                a, b = a.payload, b.payload
            elif isinstance(a, ScalingTensor):
                assert a.scale_inv.equal(b.scale_inv), column
                a, b = a.payload, b.payload
            if a.element_size() == 4:
                # Where a tiny second moment is decoded, the device's powers show in a large update; in 2 of 10,000 at most on an H200.
                apart = (a - b).abs() > COAT_STEP.numbers * (b.abs() + HYPER["lr"])
                assert apart.sum() <= COAT_STEP.codes * apart.numel(), column
                assert torch.allclose(a, b, rtol=100 * COAT_STEP.numbers, atol=100 * COAT_STEP.numbers * HYPER["lr"]), column
                continue
            elements, off = elements + a.numel(), off + int((a.float() != b.float()).sum())  # CUDA's lerp gives a zero another sign
    assert moved <= COAT_STEP.exponents * groups, (moved, groups)
    assert off <= COAT_STEP.codes * elements, (off, elements)
    assert torch.allclose(ours[1], theirs[1], rtol=COAT_STEP.kept, atol=0)
    assert all(a.equal(b) for a, b in zip(ours[0].steps, theirs[0].steps, strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("fp32", "O0", "fp16-amp", "O2", "m alone"))) for name in FORMATS]
)
def test_as_its_twin(name, triton_device):
    before, want, got = run_both(name, triton_device)
    agree(got, want)
    assert not any(a.equal(b) for a, b in zip(everything(*before)[-1:], everything(*want)[-1:], strict=True))


@pytest.mark.parametrize("name", ["O0", "O3, v in e5m2", "m alone"])
def test_tensors_of_full_groups(name, triton_device):
    _, want, got = run_both(name, triton_device, shapes=FULL)
    agree(got, want)


@pytest.mark.parametrize(
    "settings",
    [{"decoupled": False}, {"weight_decay": 0.0, "clip": None}, {"beta1": 0.0, "beta2": 0.0}, {"beta1": 0.3, "beta2": 0.999, "eps": 0.0}],
    ids=str,
)
def test_every_number_does_what_it_does_in_the_twin(settings, triton_device):
    _, want, got = run_both("O2", triton_device, shapes=[(9, 17), (4, 256)], **settings)
    agree(got, want)


@pytest.mark.parametrize("name", ["O0", "O3, v in e5m2", "m alone"])
def test_a_step_that_is_not_usable_leaves_no_trace(name, triton_device):
    before, *both = run_both(name, triton_device, usable=False)
    for after in both:
        assert all(a.equal(b) for a, b in zip(everything(*before), everything(*after), strict=True))


def step_of(m: torch.Tensor, device, formats: StateFormats = FORMATS["fp32"][0]) -> tuple[Expanded, Expanded]:
    """The moments that a step with beta 0 stores for gradients `m`."""
    x = in_training(formats, None, device, [tuple(m.shape)])
    x.grads[0] = m
    kept, tables = torch.zeros(3, 1, device=device), Tables(torch.device(device))
    flag = torch.tensor(True, device=device)
    kernel(tables, x, hyper(device, beta1=0.0, beta2=0.0), torch.ones(5, 1, device=device), kept, None, flag, decoupled=True)
    return x.ms[0], x.vs[0]


@pytest.mark.parametrize("value", [0.25, -3e-19, 3e18, -1.1])
def test_equal_magnitudes_zeros_and_empty_groups_are_exact(value, triton_device):
    g = torch.full((3, 200), value, device=triton_device)
    g[:, ::3] *= -1
    g[0, 5] = 0
    g[2] = 0
    m, v = step_of(g, triton_device)
    for state, want in ((m, g), (v, g.square())):
        assert state.k.eq(1).all()
        assert state.max.equal(STATE_GROUP.maxima(want))
        assert state.dequantize().equal(want)


def test_the_whole_range_of_a_group_is_used_and_nothing_vanishes(triton_device):
    g = make("log-normal", (16, 300), device=triton_device)
    m, v = step_of(g, triton_device)
    for state, exact in ((m, g), (v, g.square())):
        want = quantize_expanded(exact, E4M3)
        assert state.max.equal(want.max)
        assert torch.allclose(state.k, want.k, rtol=COAT_STEP.numbers)
        assert (codes(state.payload) != codes(want.payload)).float().mean() <= COAT_STEP.codes
        assert state.dequantize().ne(0).equal(exact.ne(0))


def test_what_is_not_finite_spoils_its_own_group_alone(triton_device):
    g = make("normal", (4, 256), device=triton_device)
    g[1, 130], g[2, 3] = float("inf"), float("nan")
    m, _ = step_of(g, triton_device)
    hit = STATE_GROUP.spread(STATE_GROUP.maxima(g), g.shape).isinf()
    assert m.dequantize().isnan().equal(hit)
    assert hit.sum() == 256


@every_pair
@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("shapes", [[(2048, 8192), (6151, 3), (2048,), (50304, 64), (1000, 2050)], [(2048, 8192), (50304, 384)]], ids=len)
@pytest.mark.parametrize("name", FORMATS)
def test_large_tensors_on_the_gpu(name, shapes, decoupled):
    _, want, got = run_both(name, "cuda", decoupled=decoupled, shapes=shapes)
    agree(got, want)


@pytest.mark.gpu
def test_a_graph_holds_a_step_and_follows_the_learning_rate():
    x = in_training(*FORMATS["O2"], "cuda", [(512, 1024), (300, 70)])
    other, kept, tables = copy.deepcopy(x), torch.zeros(3, 2, device="cuda"), Tables(torch.device("cuda"))
    table, flag, rates = amaxes_of(x, "cuda"), torch.tensor(True, device="cuda"), hyper("cuda")
    for _ in range(2):
        kernel(tables, x, rates, table, kept, None, flag, decoupled=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(tables, x, rates, table, kept, None, flag, decoupled=True)
    for i in range(3):
        rates[0] = 0.01 * i
        graph.replay()
    tables, kept = Tables(torch.device("cuda")), torch.zeros(3, 2, device="cuda")
    for rate in (HYPER["lr"], HYPER["lr"], 0.0, 0.01, 0.02):
        kernel(tables, other, hyper("cuda", lr=rate), table, kept, None, flag, decoupled=True)
    assert all(a.equal(b) for a, b in zip(everything(x, kept), everything(other, kept), strict=True))


@pytest.mark.parametrize("name", ["O2", "m alone", "v alone", pytest.param("v beside a plain m", marks=pytest.mark.nightly)])
def test_stochastic_rounding_of_what_is_not_coats(name, triton_device):
    """Masters, and a moment of another format: as the twin's, to a code where the update differs in its last place."""
    _, theirs, ours = run_both(name, triton_device, rounding=Rounding(m=True, v=True, masters=True))
    _, nearest = run_both(name, triton_device, alone=True)
    agree(ours, theirs)
    changed = [not values(a).equal(values(b)) for a, b in zip(theirs[0].masters, nearest[0].masters, strict=True) if a.numel() > 100]
    assert all(changed)
