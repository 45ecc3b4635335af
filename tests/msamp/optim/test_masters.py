"""Masters that follow weights which others have written."""

import pytest
import torch
from torch import nn

from helpers.numerics import make
from msamp.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from msamp.numerics.quantize import cast
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.collage import collage_adamw
from msamp.optim.masters import follow_weight_
from msamp.optim.states import make_master, payload, scale_inv, view_of_rows

PAIRS = [(E4M3, FP16), (E4M3, FP32), (E5M2, BF16), (BF16, FP32), (BF16, FP16), (FP32, FP16), (FP16, E4M3)]
every_pair = pytest.mark.parametrize(("weight", "master"), PAIRS, ids=lambda fmt: str(fmt))
SHAPE = (24, 40)


def stored(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    return ScalingTensor.quantize(values, fmt, dtype=torch.float32) if fmt.scaled else values.to(fmt.dtype)


def bits(x: torch.Tensor) -> list[torch.Tensor]:
    scale = scale_inv(x)
    return [payload(x).clone().view(torch.uint8), torch.zeros(()) if scale is None else scale.clone()]


def unchanged(x: torch.Tensor, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, bits(x), before))


@every_pair
def test_what_is_still_the_cast_keeps_all_bits(weight, master):
    """As an update leaves both, with scales from twice an older amax; and as both begin, each a rounding of the same values, of which the
    master's is the finer one."""
    values = make("normal", SHAPE)
    m = make_master(values, master)
    if master.scaled:
        m = ScalingTensor(cast(values / (8 * m.scale_inv), master), 8 * m.scale_inv, torch.float32)
    w = stored(fp32_values(m), weight)
    before = bits(m)
    follow_weight_(m, w, w)
    assert unchanged(m, before)
    m, w = make_master(values, master), stored(values, weight)
    before = bits(m)
    follow_weight_(m, w, w)
    assert unchanged(m, before) or master.mantissa_bits < weight.mantissa_bits
    if weight.bytes == 1:  # saved from the masters in a BF16 model's dtype, and loaded
        w = ScalingTensor.quantize(fp32_values(m).bfloat16(), weight)
        follow_weight_(m, w, w)
        assert unchanged(m, before)


@every_pair
@pytest.mark.parametrize("size", [2.0**-12, 1.0, 2.0**12])
def test_what_somebody_has_written_is_taken_and_nothing_else(weight, master, size):
    values = make("normal", SHAPE)
    m = make_master(values, master)
    old, w = fp32_values(m).clone(), stored(values, weight)
    written = fp32_values(w).clone()
    written[3:5] *= -size  # a code that happens to be the same is no other value
    w = stored(written, weight)
    follow_weight_(m, w, w)
    now = fp32_values(m)
    target = fp32_values(w)[3:5]
    assert (now[3:5] - target).abs().max() <= 2.0 ** -min(7, master.mantissa_bits) * target.abs().max()
    if size == 1.0 and weight.mantissa_bits < master.mantissa_bits:
        rest = torch.arange(24).lt(3) | torch.arange(24).ge(5)
        assert now[rest].equal(old[rest])
        assert now[3:5].equal(target)


def test_pieces_have_the_scale_of_the_whole():
    """And pieces of which one was written and the other was not, too."""
    values = make("normal", SHAPE)
    whole = make_master(values, FP16)
    w = stored(values, E4M3)
    w.payload[12:].copy_(stored(make("normal", (12, 40), seed=3), E4M3).payload)
    w.scale_inv.mul_(2.0**20)
    pieces = []
    for rows in (slice(0, 12), slice(12, 24)):
        piece = ScalingTensor(whole.payload[rows].clone(), whole.scale_inv.clone(), torch.float32)
        follow_weight_(piece, view_of_rows(w, rows), w)
        pieces.append(piece)
    assert pieces[0].scale_inv.equal(pieces[1].scale_inv)
    follow_weight_(whole, w, w)
    assert torch.cat([p.dequantize() for p in pieces]).equal(whole.dequantize())


# ----------------------------------------------------------------------------------------------------------- pairs of BF16


def pair_steps(p: nn.Parameter, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        optimizer.step()


@pytest.mark.parametrize("name", ["light", "plus", "kahan", "fp8"])
def test_of_a_pair_whose_weight_is_written_the_second_component_is_dropped(name):
    p = nn.Parameter(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16())
    optimizer = collage_adamw([p], lr=1e-3, weight_decay=0.0, variant=name)
    pair_steps(p, optimizer, 3)
    remainder = optimizer.state[p]["weight_remainder"]
    before, kept = p.detach().clone(), remainder.float().clone()
    assert kept.any()
    with torch.no_grad():
        p.copy_(p * 2)
        p.copy_(before)  # put back, as an average of weights is
    optimizer.reload_model_params()
    assert remainder.float().equal(kept)
    with torch.no_grad():
        p[2:] = 0.0
    optimizer.reload_model_params()
    assert remainder[:2].float().equal(kept[:2])
    assert name == "fp8" or not remainder[2:].float().any()
    p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        p.zero_()
    optimizer.step()
    assert not p.any()
