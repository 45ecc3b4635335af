"""Slots of the scale exchange: scales against a search in FP64, and what MIN does with the marks."""

import itertools

import pytest
import torch
from numerics import KINDS, floats, golden, make

from msamp.comm.scale_sync import ABSENT, NOT_FINITE, local_slots, usable
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32

scaled = pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)
ZERO = 2.0**126  # of a gradient of zeros only
INF, NAN = float("inf"), float("nan")


def searched(amax: float, limit: float) -> float:
    """The largest power of two from 2^-126 to 2^126 with amax * scale <= limit, or the smallest one."""
    return max((2.0**e for e in range(-126, 127) if amax * 2.0**e <= limit), default=2.0**-126)


def slots(gradients, fmt) -> list[float]:
    return local_slots(gradients, fmt, torch.device("cpu")).tolist()


@scaled
def test_a_slot_is_the_largest_power_of_two_that_fits(fmt):
    """Next to powers of two and to the format's maximum, where a division or log2 in FP32 is off; tiny and huge ones too."""
    exponents = (-149, -126, -119, -118, -100, -20, -1, 0, 3, 9, 16, 60, 127)
    around = [torch.tensor(2.0**e) for e in exponents] + [torch.tensor(fmt.max * 2.0**e) for e in exponents if -100 < e < 100]
    amaxes = [
        f(x) for x in around for f in (lambda x: x, lambda x: x.nextafter(torch.tensor(INF)), lambda x: x.nextafter(torch.tensor(0.0)))
    ]
    amaxes = [x for x in amaxes if 0 < x < INF]
    gradients = [torch.stack([x / 2, -x, torch.tensor(0.0)]) for x in amaxes]
    assert slots(gradients, fmt) == [searched(float(x), fmt.max) for x in amaxes]


def test_golden_scales_of_the_exchange():
    vectors = golden("exchange_fp32_sum")
    gradients = [floats(g) for g in vectors["ranks"]]
    assert [slots([g], E4M3)[0] for g in gradients] == vectors["scales"]
    assert min(vectors["scales"]) == vectors["shared"]


@scaled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype_shape_and_stride(dtype, kind, fmt):
    shapes = ((), (1,), (129,), (3, 5, 7), (64, 33))
    gradients = [make(kind, shape or (1,), i).view(shape).to(dtype).clamp(-6e4, 6e4) for i, shape in enumerate(shapes)]
    gradients += [gradients[-1].T, gradients[-1][::2, 1::3]]
    assert slots(gradients, fmt) == [searched(float(g.abs().amax()), fmt.max) for g in gradients]


@scaled
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_marks(place, bad, fmt):
    g = make("normal", (1000,))
    broken = g.clone()
    broken[place] = bad
    want = searched(float(g.abs().amax()), fmt.max)
    assert slots([g, broken, None, torch.zeros(3), torch.tensor(-0.0), torch.full((4,), bad), None], fmt) == [
        want,
        NOT_FINITE,
        ABSENT,
        ZERO,
        ZERO,
        NOT_FINITE,
        ABSENT,
    ]


@pytest.mark.parametrize("fmt", [E4M3, FP16, BF16, FP32], ids=str)
def test_no_gradient_at_all(fmt):
    assert slots([None, None], fmt) == [ABSENT, ABSENT]


@scaled
def test_a_tensor_without_elements_asks_for_nothing(fmt):
    assert slots([torch.zeros(0, 4), torch.ones(2)], fmt) == [ZERO, searched(1.0, fmt.max)]


@pytest.mark.parametrize("fmt", [BF16, FP32], ids=str)
def test_formats_without_scales_only_say_who_has_a_gradient(fmt):
    gradients = [torch.tensor([NAN]), None, torch.zeros(2), torch.full((2,), 1e30), torch.tensor([1.0, -INF]).to(fmt.dtype)]
    assert slots(gradients, fmt) == [1, ABSENT, 1, 1, 1]
    assert local_slots(gradients, fmt, torch.device("cpu"), plain=True).tolist() == [NOT_FINITE, ABSENT, 1, 1, NOT_FINITE]


def test_min_prefers_not_finite_then_scales_then_zeros_then_absent():
    order = [NOT_FINITE, 2.0**-126, 2.0**-3, 1.0, 2.0**125, ZERO, ABSENT]
    for a, b in itertools.combinations(order, 2):
        assert torch.minimum(torch.tensor(a), torch.tensor(b)).item() == a


def test_usable_gives_1_where_there_is_no_scale():
    assert usable(torch.tensor([NOT_FINITE, ABSENT, 2.0**-126, 0.25, ZERO])).tolist() == [1, 1, 2.0**-126, 0.25, ZERO]


@pytest.mark.gpu
@scaled
def test_the_gpu_finds_the_same_slots(fmt):
    gradients = [None, torch.zeros(5), torch.tensor([1.0, NAN]), torch.tensor([INF]), *(make(kind, (129, 65)) for kind in KINDS)]
    on_gpu = local_slots([None if g is None else g.cuda() for g in gradients], fmt, torch.device("cuda"))
    assert on_gpu.cpu().tolist() == slots(gradients, fmt)
