"""Runs of tensors in one buffer."""

import pytest
import torch

from helpers.choices import every_pair
from helpers.numerics import KINDS, bits, make
from msamp.kernels.reference.grad_stats import carried, grad_stats
from msamp.kernels.reference.pack import check_pieces, pack
from msamp.numerics.formats import ALL, E4M3
from msamp.numerics.quantize import quantize
from msamp.numerics.tensor import ScalingTensor


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_every_run_is_the_cast_of_its_values_and_what_lies_between_stays(fmt):
    xs = [make("normal", (6, 4)), make("log-normal", (5,)).bfloat16()]
    factors = torch.tensor([4.0, 0.37]) if fmt.scaled else None
    out = torch.full((30,), 1.0).to(fmt.dtype)
    pack(None, xs, [(0, 8, 16, 0), (1, 0, 5, 17), (0, 0, 8, 22)], out, factors)
    want = [quantize(x, 1.0 if factors is None else factors[i], fmt).flatten() for i, x in enumerate(xs)]
    one = torch.ones(1).to(fmt.dtype)
    assert bits(out).equal(torch.cat([bits(x) for x in (want[0][8:], one, want[1], want[0][:8])]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tally_is_what_a_read_of_the_codes_would_give(kind):
    x, factor, out = make(kind, (64, 40)), torch.tensor([0.25]), torch.empty(2560, dtype=E4M3.dtype)
    amaxes, tallies = torch.zeros(1), torch.zeros(2, 3, dtype=torch.int64)
    pack(None, [x], [(0, 0, 1000, 0), (0, 1000, 1560, 1000)], out, factor, amaxes=amaxes, tallies=tallies)
    stats, sums = grad_stats(None, [ScalingTensor(out, torch.ones(()))])
    assert amaxes.item() == x.abs().max()
    assert tallies[:, 0].max().to(torch.int32).view(torch.float32) == stats[0, 0]
    assert carried(tallies[:, 1:].sum(0, keepdim=True)).equal(sums)


def test_what_has_its_factor_already_is_left_alone():
    xs, factors = [make("normal", (8,), i) for i in range(3)], torch.tensor([2.0, float("nan"), 4.0])
    out, tallies = torch.zeros(24, dtype=E4M3.dtype), torch.zeros(3, 3, dtype=torch.int64)
    pack(None, xs, [(i, 0, 8, 8 * i) for i in range(3)], out, factors, tallies=tallies, unless=torch.tensor([2.0, float("nan"), 2.0]))
    assert not out[:8].view(torch.uint8).any()
    assert out[8:16].float().isnan().all()  # NaN equals nothing
    assert bits(out[16:]).equal(bits(quantize(xs[2], 4.0, E4M3)))
    assert tallies.any(1).tolist() == [False, True, True]


@every_pair
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_ranks_are_summed_in_fp32_in_their_order_and_rounded_once(fmt, ranks, divide):
    x = torch.stack([make("log-normal", (40,), rank) for rank in range(ranks)]).to(E4M3.dtype if fmt.bytes == 1 else torch.float32)
    factors = torch.tensor([0.37]) if fmt.scaled else None
    out, amaxes, divisor = torch.zeros(30).to(fmt.dtype), torch.zeros(1), ranks if divide else 1
    pack(None, [x], [(0, 10, 30, 0)], out, factors, amaxes=amaxes, ranks=ranks, divisor=divisor)
    total = x[0].float()
    for row in x[1:]:
        total = total + row.float()
    mean = (total / divisor)[10:]
    assert bits(out).equal(bits(quantize(mean, 1.0 if factors is None else factors[0], fmt)))
    assert amaxes.item() == mean.abs().max()


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ((0, 0, 4, 0), "a piece of 4 elements from 0, written at 0, exceeds tensor 0 of 3 elements or the buffer of 4; a grad"),
        ((0, 0, 3, 2), "a piece of 3 elements from 0, written at 2, exceeds tensor 0 of 3 elements or the buffer of 4"),
    ],
)
def test_a_gradient_of_another_shape_is_refused(piece, message):
    with pytest.raises(ValueError, match=message):
        check_pieces([torch.zeros(2, 3)], [piece], torch.empty(4), None, ranks=2)
