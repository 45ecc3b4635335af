"""The Triton cast+transpose bit for bit against its twin (but for the sign of NaN): under the interpreter here, compiled on a GPU."""

import importlib
import itertools

import pytest
import torch

from helpers.agreement import assert_codes, assert_sums
from helpers.choices import each_once, every_pair
from helpers.numerics import bits, codes, make
from msamp.kernels.reference.cast_transpose import cast_transpose as twin
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.granularity import Group

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, for the interpreter
FP8, DTYPES = (E4M3, E5M2), (torch.float32, torch.bfloat16, torch.float16)
every_fp8 = pytest.mark.parametrize("fmt", FP8, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def kernel(*args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.cast_transpose").cast_transpose(*args, **flags)


def assert_same(x: torch.Tensor, scale: float | None, fmt, slot: float | None = 0.0, asked=(True, True, True)) -> None:
    scale_t = None if scale is None else torch.tensor(scale, device=x.device)
    slots = [None if slot is None else torch.tensor(slot, device=x.device) for _ in range(2)]
    flags = dict(zip(("row", "col", "colsum"), asked, strict=True))
    got, want = kernel(x, scale_t, slots[0], fmt.dtype, **flags), twin(x, scale_t, slots[1], fmt.dtype, **flags)
    for g, w in zip(got[:2], want[:2], strict=True):
        assert_codes(g, w)
    assert got[2].equal(want[2]) or (got[2].isnan() and want[2].isnan())
    assert got[3].numel() == 0 or asked[2]
    if x.isfinite().all() and asked[2]:
        assert_sums(got[3].sum(0), want[3].sum(0), x.float().abs().sum(0))
    if slot is not None:
        assert bits(slots[0]).equal(bits(slots[1]))


@each_once(fmt=FP8, dtype=DTYPES, shape=[(3, 5), (129, 65), (1, 1), (16, 16), (128, 64), (127, 191), (300, 7)])
def test_ragged_shapes(fmt, dtype, shape, triton_device):
    assert_same(make("log-normal", shape, device=triton_device).to(dtype), 4.0, fmt)


@each_once(asked=[asked for asked in itertools.product([False, True], repeat=3) if asked != (False, False, True)], scale=[None, 0.25])
def test_everything_that_can_be_left_out(asked, scale, triton_device):
    for rows in (40, 41):  # whole words of four rows, and not
        assert_same(make("normal", (rows, 70), device=triton_device), scale, E5M2, asked=asked)


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("old", [0.0, 2.0, 1e30])
def test_the_slot_is_raised_to_the_amax(old, scale, triton_device):
    assert_same(make("normal", (200, 100), device=triton_device), scale, E4M3, slot=old)


@each_once(fmt=FP8, bad=[float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0], scale=[None, 2.0])
def test_special_values(fmt, bad, scale, triton_device):
    x = make("normal", (130, 70), device=triton_device)
    x[126, 0] = x[129, 69] = bad
    assert_same(x, scale, fmt, slot=1.0)


def test_one_value_in_any_of_four_rows_shows(triton_device):
    for place in range(4):
        x = torch.zeros(12, 5, device=triton_device)
        x[4 + place, 3] = float("nan")
        assert_same(x, None, E4M3)


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("bad", [1.0, float("inf")])
def test_scale_inv_is_left_in_its_slot(bad, scale, triton_device):
    x, slot = make("normal", (140, 70), device=triton_device), torch.zeros((), device=triton_device)
    x[135, 3] = bad
    scale_t = None if scale is None else torch.tensor(scale, device=triton_device)
    own = kernel(x, scale_t, None, E4M3.dtype, row=True, col=True)
    given = kernel(x, scale_t, None, E4M3.dtype, row=True, col=True, scale_inv_slot=slot)
    assert given[2].numel() == 0
    assert bits(slot).equal(bits(own[2]))
    assert all(codes(a).equal(codes(b)) for a, b in zip(own[:2], given[:2], strict=True))


@pytest.mark.promise("Group scaling", "A cast by the producer's maxima has the codes, scale and amax of a cast that reads twice.")
@each_once(fmt=FP8, bad=[1.0, float("nan"), -float("inf")])
def test_an_amax_in_two_stages_changes_no_bit(fmt, bad, triton_device):
    x = make("log-normal", (140, 70), device=triton_device).bfloat16()
    x[135, 3] = bad
    slots = [torch.zeros((), device=triton_device) for _ in range(2)]
    want = kernel(x, None, slots[0], fmt.dtype, row=True, col=True, colsum=True)
    got = kernel(x, None, slots[1], fmt.dtype, row=True, col=True, colsum=True, maxima=Group(16).maxima(x))
    assert all(bits(a).equal(bits(b)) for a, b in zip((*got[2:], slots[1]), (*want[2:], slots[0]), strict=True))
    assert all(codes(a).equal(codes(b)) for a, b in zip(got[:2], want[:2], strict=True))


def test_the_maxima_decide_the_scale_and_the_tensor_is_not_asked(triton_device):
    x, maxima = make("normal", (40, 70), device=triton_device), torch.tensor([[3.0], [448.0]], device=triton_device)
    got, want = (f(x, None, None, E4M3.dtype, row=True, maxima=maxima) for f in (kernel, twin))
    assert got[2] == want[2] == 1.0
    assert codes(got[0]).equal(codes(want[0]))


@each_once(fmt=FP8, dtype=DTYPES, shape=[(1, 1), (130, 65), (128, 192)])
def test_the_transpose_alone_has_the_same_codes(fmt, dtype, shape, triton_device):
    x = make("log-normal", shape, device=triton_device).to(dtype)
    y, _, scale_inv, _ = kernel(x, None, None, fmt.dtype, row=True)
    module = importlib.import_module("msamp.kernels.triton.cast_transpose")
    y_t = module.cast_transposed(x, scale_inv, fmt.dtype)
    assert (y_t.shape, y_t.is_contiguous()) == (shape[::-1], True)
    assert codes(y_t).equal(codes(y).t())


def test_strided_inputs_and_no_slot(triton_device):
    x = make("normal", (64, 96), device=triton_device)
    assert_same(x.t(), 2.0, E4M3)
    assert_same(x[::2, 1::3], None, E4M3, slot=None)


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)], ids=str)
def test_nothing_to_cast(shape, scale, triton_device):
    assert_same(torch.empty(shape, device=triton_device), scale, E4M3, slot=3.0)


@every_pair
@pytest.mark.gpu
@every_fp8
@every_dtype
@pytest.mark.parametrize("scale", [None, 2.0])
def test_large_on_the_gpu(fmt, dtype, scale):
    assert_same((torch.randn(8192, 6144, device="cuda") * 100).to(dtype), scale, fmt)
    assert_same((torch.randn(4099, 6151, device="cuda") * 100).to(dtype), scale, fmt)


@pytest.mark.gpu
def test_more_elements_than_int32_counts():
    x = torch.zeros(2**16 + 4, 2**15, device="cuda", dtype=torch.bfloat16)
    x[-1, -1] = -300.0
    slot = torch.zeros((), device="cuda")
    y, y_t, _, sums = kernel(x, torch.ones((), device="cuda"), slot, E4M3.dtype, row=True, col=True, colsum=True)
    assert slot == 300
    assert y[-1, -8:].float().tolist() == y_t[-8:, -1].float().tolist() == [0.0] * 7 + [-288.0]
    assert sums.sum(0)[-2:].tolist() == [0.0, -300.0]
