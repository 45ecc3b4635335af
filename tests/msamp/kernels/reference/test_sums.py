"""Sums of parts and of payloads: against FP64, in every dtype; what is refused."""

import pytest
import torch

from helpers.choices import every_pair
from helpers.numerics import KINDS, bits, make
from msamp.kernels.reference.sums import sum_parts, sum_payloads
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_tensor_is_added_up_and_rounded_once(dtype):
    parts = [make("normal", (rows, width), seed=rows) for rows, width in ((1, 40), (70, 3), (5, 1))]
    for x, got in zip(parts, sum_parts(parts, dtype), strict=True):
        assert (got.shape, got.dtype) == (x.shape[1:], dtype)
        torch.testing.assert_close(got.double(), x.double().sum(0), rtol=torch.finfo(dtype).eps, atol=1e-5)


ALL = (E4M3, E5M2, BF16, FP16, FP32)


@every_pair
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ALL, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_it_is_the_sum_rounded_once(ranks, fmt, kind):
    payloads = make(kind, (ranks, 300)).clamp(-400, 400).to(fmt.dtype)
    got = sum_payloads(payloads, torch.tensor(0.25), torch.bfloat16)
    want = (payloads.double().sum(0) * 0.25).bfloat16()
    torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6 * float(payloads.double().abs().sum(0).max()))
    assert payloads.equal(payloads.clone())


def test_the_order_is_that_of_the_ranks():
    assert sum_payloads(torch.tensor([[2.0**25], [1.0], [-(2.0**25)], [3.0]]).bfloat16(), None, torch.float32).item() == 3.0


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_an_fp8_sum_saturates_and_keeps_nan(fmt):
    payloads = torch.tensor([[fmt.max, 1.0, float("nan"), -fmt.max], [fmt.max, 1.0, 1.0, -fmt.max]]).to(fmt.dtype)
    got = sum_payloads(payloads, None, fmt.dtype).float()
    assert got[:2].tolist() == [fmt.max, 2.0]
    assert got[2].isnan()
    assert got[3] == -fmt.max


@pytest.mark.parametrize("rank", range(3))
def test_the_own_part_stands_for_its_row(rank):
    payloads = make("normal", (3, 40)).bfloat16()
    own, without = payloads[rank].clone(), payloads.clone()
    without[rank] = float("nan")
    assert sum_payloads(without, None, torch.float32, own, rank).equal(sum_payloads(payloads, None, torch.float32))


@pytest.mark.parametrize(
    ("own", "rank"), [(torch.ones(5), 0), (torch.ones(4).half(), 0), (torch.ones(4), 2)], ids=["short", "half", "rank 2"]
)
def test_an_own_part_that_is_no_row_is_refused(own, rank):
    with pytest.raises(ValueError, match=f"of rank {rank}; it must be torch.float32 .4,. of a rank below 2"):
        sum_payloads(torch.ones(2, 4), None, torch.float32, own, rank)


def test_nothing_sent_is_nothing_summed():
    assert bits(sum_payloads(torch.empty(3, 0), None, torch.bfloat16)).numel() == 0


@pytest.mark.parametrize("payloads", [torch.ones(4), torch.ones(0, 4), torch.ones(4, 6).t()], ids=["1-d", "no rank", "strided"])
def test_other_shapes_are_refused(payloads):
    with pytest.raises(ValueError, match=r"payloads are \(.*they must be \[ranks, n\], contiguous"):
        sum_payloads(payloads, None, torch.float32)
