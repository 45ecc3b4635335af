"""The Triton cast in blocks bit for bit against its twin (but for the sign of NaN): under the interpreter here, compiled on a GPU."""

import importlib
import itertools

import pytest
import torch

from helpers.agreement import assert_codes
from helpers.choices import each_once, every_pair, every_value
from helpers.numerics import bits, make, random_floats
from msamp.kernels.reference.block_cast import block_cast as twin
from msamp.numerics.block_scale import RULES
from msamp.numerics.formats import E4M3, E5M2
from msamp.numerics.granularity import Block

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, for the interpreter
FP8, DTYPES = (E4M3, E5M2), (torch.float32, torch.bfloat16, torch.float16)
every_rule = pytest.mark.parametrize("rule", RULES)
every_fp8 = pytest.mark.parametrize("fmt", FP8, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BLOCKS = ROWS, SQUARE, MX = Block(1, 128), Block(128, 128), Block(1, 32)
every_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


def kernel(*args, **flags):
    # Imported late: the kernels take the interpreter or the compiler when their file is imported.
    return importlib.import_module("msamp.kernels.triton.block_cast").block_cast(*args, **flags)


def assert_same(
    x: torch.Tensor, block: Block, rule: str, fmt=E4M3, slot: float | None = 0.0, multiplier: float | None = None, asked=(True, True)
):
    flags = {"rows": block.rows, "columns": block.columns, "dtype": fmt.dtype, "scale_rule": rule, "row": asked[0], "col": asked[1]}
    factor = None if multiplier is None else torch.tensor(multiplier, device=x.device)
    slots = [None if slot is None else torch.tensor(slot, device=x.device) for _ in range(2)]
    got, want = kernel(x, factor, slots[0], **flags), twin(x, factor, slots[1], **flags)
    for g, w in zip(got[::2], want[::2], strict=True):
        assert_codes(g, w)
    for g, w in zip(got[1::2], want[1::2], strict=True):
        assert (g.dtype, g.shape, g.stride(), g.device) == (w.dtype, w.shape, w.stride(), w.device)
        assert g.isnan().equal(w.isnan())
        assert bits(g.nan_to_num(-1.0) if g.is_floating_point() else g).equal(bits(w.nan_to_num(-1.0) if w.is_floating_point() else w))
    if slot is not None:
        assert bits(slots[0]).equal(bits(slots[1]))


@each_once(block=BLOCKS, dtype=DTYPES, shape=[(3, 5), (130, 129), (1, 1), (127, 65), (4, 260)])
def test_ragged_shapes(block, dtype, shape, triton_device):
    rule = "e8m0" if block == MX else "fp32"
    assert_same(make("log-normal", shape, device=triton_device).to(dtype), block, rule)


@each_once(rule=list(RULES), fmt=FP8, block=[*BLOCKS, Block(32, 32), Block(1, 16), Block(64, 64)])
def test_every_rule_in_blocks_of_all_sizes(rule, fmt, block, triton_device):
    assert_same(make("channel-outlier", (140, 72), device=triton_device).bfloat16(), block, rule, fmt)


@every_value
@every_block
@pytest.mark.parametrize("asked", itertools.product([False, True], repeat=2), ids=str)
def test_everything_that_can_be_left_out(block, asked, triton_device):
    for rows in (40, 41):  # whole words of four rows, and not
        assert_same(make("normal", (rows, 70), device=triton_device), block, "fp32", asked=asked)


@each_once(rule=list(RULES), block=BLOCKS, fmt=FP8)
def test_random_bits_of_all_magnitudes(rule, fmt, block, triton_device):
    x = random_floats(20_000, seed=9)
    # Sorted, neighbours share a block: blocks of every magnitude. Most of those of the unsorted ones are not finite.
    finite = x[x.isfinite()].sort().values[:19_200]
    assert_same(finite.view(100, 192).to(triton_device), block, rule, fmt)
    assert_same(x[:7000].view(70, 100).to(triton_device), block, rule, fmt)


@every_rule
def test_amaxes_beside_powers_of_two_and_beside_the_largest_value(rule, triton_device):
    edges = torch.cat(
        [torch.tensor([1.0, 1.75, 448.0 / 256, 57344.0 / 32768]) * 2.0**k for k in (-140, -126, -119, -118, -10, 0, 100, 126)]
    )
    around = torch.cat([(edges.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)])
    x = torch.zeros(len(around), 32)
    x[:, 5] = around
    for fmt in (E4M3, E5M2):
        assert_same(x.to(triton_device), MX, rule, fmt)


@each_once(bad=[float("nan"), -float("inf"), -0.0], rule=list(RULES), block=BLOCKS)
def test_special_values(bad, rule, block, triton_device):
    x = make("normal", (130, 70), device=triton_device)
    x[126, 0] = x[129, 69] = bad
    assert_same(x, block, rule, slot=1.0)


def test_one_value_in_any_of_four_rows_shows(triton_device):
    for place in range(4):
        x = torch.zeros(12, 5, device=triton_device)
        x[4 + place, 3] = float("nan")
        assert_same(x, MX, "e8m0")


@every_block
@pytest.mark.parametrize("multiplier", [2.0**-9, 0.3])
def test_a_multiplier(block, multiplier, triton_device):
    assert_same(make("log-normal", (130, 70), device=triton_device).half(), block, "fp32", multiplier=multiplier)


@each_once(block=BLOCKS, fmt=FP8)
def test_an_fp8_payload_and_its_scale(block, fmt, triton_device):
    codes = torch.arange(256, dtype=torch.uint8, device=triton_device).repeat(130, 1)
    assert_same(codes.view(fmt.dtype), block, "fp32", multiplier=2.0**-9)
    assert_same(codes[:, :0x70].contiguous().view(fmt.dtype), block, "power-of-two", multiplier=2.0**-9)


@pytest.mark.parametrize("old", [0.0, 2.0, 1e30])
def test_the_slot_is_raised_to_the_amax(old, triton_device):
    assert_same(make("normal", (200, 100), device=triton_device), ROWS, "fp32", slot=old)


def test_strided_inputs_and_no_slot(triton_device):
    x = make("normal", (64, 96), device=triton_device)
    assert_same(x.t(), ROWS, "fp32")
    assert_same(x[::2, 1::3], SQUARE, "power-of-two", slot=None)


@every_block
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)], ids=str)
def test_nothing_to_cast(block, shape, triton_device):
    assert_same(torch.empty(shape, device=triton_device), block, "fp32", slot=3.0)


@every_pair
@pytest.mark.gpu
@every_rule
@every_fp8
@every_dtype
@every_block
def test_large_on_the_gpu(rule, fmt, dtype, block):
    for shape in ((8192, 6144), (4099, 6151)):
        assert_same((torch.randn(shape, device="cuda") * 100).to(dtype), block, rule, fmt)


@pytest.mark.gpu
def test_more_elements_than_int32_counts():
    x = torch.zeros(2**16 + 4, 2**15, device="cuda", dtype=torch.bfloat16)
    x[-1, -1] = -300.0
    slot = torch.zeros((), device="cuda")
    flags = {"rows": 1, "columns": 128, "dtype": E4M3.dtype, "scale_rule": "power-of-two", "row": True, "col": True}
    y, scale_inv, y_t, scale_inv_t = kernel(x, None, slot, **flags)
    assert slot == 300
    assert y[-1, -8:].float().tolist() == y_t[-8:, -1].float().tolist() == [0.0] * 7 + [-288.0]
    assert scale_inv[-1, -2:].tolist() == scale_inv_t[-1, -2:].tolist() == [1.0, 1.0]
