"""Proposals of the shared scale against a search in FP64, and what MIN does with the marks; mu against golden vectors and by hand."""

import pytest
import torch

from helpers.choices import each_value
from helpers.numerics import KINDS, golden, make
from msamp.comm.grad_scaling import ABSENT, GRAD_SCALINGS, MU_RULES, NOT_FINITE, AutoScale, check_grad_scaling, propose_scales
from msamp.numerics.formats import E4M3, E5M2, FP16

scaled = pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
ZERO = 2.0**126  # of a gradient of zeros only
INF, NAN = float("inf"), float("nan")


def searched(amax: float, limit: float) -> float:
    """The largest power of two from 2^-126 to 2^126 with amax * scale <= limit, or the smallest one."""
    return max((2.0**e for e in range(-126, 127) if amax * 2.0**e <= limit), default=2.0**-126)


def proposed(gradients, fmt) -> list[float]:
    return propose_scales(gradients, fmt, torch.device("cpu")).tolist()


@scaled
def test_a_proposal_is_the_largest_power_of_two_that_fits(fmt):
    """Next to powers of two and to the format's maximum, where a division or log2 in FP32 is off; tiny and huge ones too."""
    exponents = (-149, -126, -119, -118, -100, -20, -1, 0, 3, 9, 16, 60, 127)
    around = [torch.tensor(2.0**e) for e in exponents] + [torch.tensor(fmt.max * 2.0**e) for e in exponents if -100 < e < 100]
    amaxes = [
        f(x) for x in around for f in (lambda x: x, lambda x: x.nextafter(torch.tensor(INF)), lambda x: x.nextafter(torch.tensor(0.0)))
    ]
    amaxes = [x for x in amaxes if 0 < x < INF]
    gradients = [torch.stack([x / 2, -x, torch.tensor(0.0)]) for x in amaxes]
    assert proposed(gradients, fmt) == [searched(float(x), fmt.max) for x in amaxes]


@each_value(fmt=[E4M3, E5M2, FP16], bad=[NAN, INF, -INF], place=[0, 500, 999])
def test_marks(place, bad, fmt):
    g = make("normal", (1000,))
    broken = g.clone()
    broken[place] = bad
    want = searched(float(g.abs().amax()), fmt.max)
    assert proposed([g, broken, None, torch.zeros(3), torch.tensor(-0.0), torch.full((4,), bad), None], fmt) == [
        want,
        NOT_FINITE,
        ABSENT,
        ZERO,
        ZERO,
        NOT_FINITE,
        ABSENT,
    ]


@pytest.mark.gpu
@scaled
def test_the_gpu_proposes_the_same(fmt):
    gradients = [None, torch.zeros(5), torch.tensor([1.0, NAN]), torch.tensor([INF]), *(make(kind, (129, 65)) for kind in KINDS)]
    on_gpu = propose_scales([None if g is None else g.cuda() for g in gradients], fmt, torch.device("cuda"))
    assert on_gpu.cpu().tolist() == proposed(gradients, fmt)


MILLION = 10**6
OVERFLOWS = (100, *range(600, 603), *range(700, 706))
# Step -> log4 of mu before it, at 4 ranks (least mu 4^-2): a quiet step adds 1/1000, halving takes 1/2, 1/2 itself is 4^-0.5.
BY_HAND = {
    "halve": {
        0: 0.0,
        100: 0.1,
        101: -0.4,
        600: 0.099,
        601: -0.401,
        602: -0.901,
        603: -1.401,
        700: -1.304,
        701: -1.804,
        702: -2.0,
        706: -2.0,
        707: -1.999,
        1199: -1.507,
    },
    "paper": {0: 0.0, 100: 0.1, 101: -0.5, 600: -0.001, 601: -0.5, 603: -0.5, 700: -0.403, 701: -0.5, 706: -0.5, 707: -0.499, 1199: -0.007},
}
QUIET = {0: 0.0, 1: 0.001, 250: 0.25, 500: 0.5, 501: 0.5, 1199: 0.5}


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("rule", MU_RULES)
def test_golden_mu(rule):
    vectors = golden("mu")
    scale = AutoScale([vectors["n"]], vectors["ranks"], rule)
    before = []
    for step in range(vectors["steps"][-1] + 1):
        before.append(scale.mu.item())
        scale.update(counts(vectors["saturated"].get(str(step), 0)), counts(0), torch.tensor([True]))
    assert [before[step] for step in vectors["steps"]] == pytest.approx(vectors[rule], rel=1e-6)


@pytest.mark.parametrize("rule", MU_RULES)
def test_1200_steps_with_planted_overflow_follow_the_trace_by_hand(rule, device):
    """Overflow in the payload, overflow in the sum, none, and a tensor that never has a valid gradient."""
    scale = AutoScale([MILLION] * 4, 4, rule, device)
    memory, valid = scale.mu.data_ptr(), torch.tensor([True, True, True, False], device=device)
    trace = []
    for step in range(1200):
        trace.append(scale.mu.clone())
        planted = 11 if step in OVERFLOWS else 10
        scale.update(counts(planted, 0, 10, planted).to(device), counts(0, planted, 10, planted).to(device), valid)
    assert scale.mu.data_ptr() == memory
    for step, exponent in BY_HAND[rule].items():
        assert trace[step][:2].tolist() == pytest.approx([4.0**exponent] * 2, rel=1e-12), step
    for step, exponent in QUIET.items():
        assert trace[step][2].item() == pytest.approx(4.0**exponent, rel=1e-12), step
    assert all(mu[3] == 1 for mu in trace)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="'double' is unknown; choose one of halve, paper"):
        AutoScale([1], 1, "double")
    with pytest.raises(ValueError, match="gradient scaling 'both' is unknown; choose one of auto, pre, post"):
        check_grad_scaling("both")


def test_the_three_of_figure_7():
    scales, mu = torch.tensor([8.0, 2.0**-126]), torch.tensor([0.3, 2.0], dtype=torch.float64)
    assert list(GRAD_SCALINGS) == ["auto", "pre", "post"]
    assert [name for name, scaling in GRAD_SCALINGS.items() if scaling.adapts] == ["auto"]
    found = {name: scaling.factor(scales, 3, mu) for name, scaling in GRAD_SCALINGS.items()}
    assert all(factor.dtype is torch.float32 for factor in found.values())
    assert found["auto"].equal(torch.tensor([8.0, 2.0**-126]) * torch.tensor([0.3, 2.0]))
    assert found["pre"].equal(torch.tensor([8.0, 2.0**-126]) / 3)
    assert found["post"].equal(scales)
