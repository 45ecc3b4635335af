"""Norm and clipping over plain and FP8 gradients together."""

import math

import pytest
import torch
from torch import nn

from helpers.choices import each_value
from helpers.numerics import KINDS, bits, codes, make
from msamp.kernels import ops
from msamp.kernels.reference.grad_stats import carried
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, E5M2, FP16
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import clip_, clip_coefficient, first_pass, grad_norm, norms_from_square_sums, second_pass, units


def gradients(device="cpu") -> list[torch.Tensor]:
    plain = [make("normal", (40, 8), device=device), make("normal", (8,), seed=1, device=device).bfloat16()]
    low = [ScalingTensor.quantize(make("log-normal", (16, 8), seed=2 + i, device=device), f) for i, f in enumerate((E4M3, E5M2, FP16))]
    return [*plain, *low]


def values(g: torch.Tensor) -> torch.Tensor:
    return g.dequantize(torch.float64) if isinstance(g, ScalingTensor) else g.double()


def parameters(grads: list[torch.Tensor]) -> list[nn.Parameter]:
    ps = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype, device=g.device)) for g in grads]
    for p, g in zip(ps, grads, strict=True):
        p.grad = g
    return [*ps, nn.Parameter(torch.zeros(3))]


def test_the_norm_of_each_gradient_and_of_all(device):
    grads = gradients(device)
    for g in grads:
        assert grad_norm([g]).dtype == torch.float64
        assert grad_norm([g]).item() == pytest.approx(values(g).norm().item(), rel=1e-12)
    want = math.sqrt(sum(values(g).square().sum().item() for g in grads))
    assert grad_norm(grads).item() == pytest.approx(want, rel=1e-12)


def tensor_amaxes(xs: list[torch.Tensor]) -> torch.Tensor:
    return ops.grad_stats(Tables(xs[0].device), xs, squares=False)[0][0]


VALUES = {
    **{f"{kind}, {rows} rows": make(kind, (rows, 16)) for kind in KINDS for rows in (1, 63, 500)},
    "tiny": make("normal", (40, 8)) * 1e-38 * 1e-2,  # subnormal: the scale's exponent is at its limit
    "smallest": torch.full((5, 3), 2.0**-149),
    "huge": make("normal", (40, 8)).sign() * 3e38,
    "bf16": make("log-normal", (63, 16)).bfloat16(),
    "one": torch.full((), -0.3),
}


def test_the_norm_is_that_of_fp64(device):
    for name, x in VALUES.items():
        assert x.isfinite().all()
        assert grad_norm([x.to(device)]).item() == pytest.approx(x.double().norm().item(), rel=1e-12, abs=0), name


def total(parts: list[torch.Tensor], whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The added sums of squares of the rows of a gradient, and its norm."""
    tables = Tables(whole.device)
    stats, sums = first_pass(tables, *(([whole], []) if isinstance(whole, ScalingTensor) else ([], [whole])))
    if isinstance(whole, ScalingTensor):
        found = [first_pass(tables, [part], [])[1] for part in parts]
    else:
        found = [second_pass(tables, [part], stats[0], [whole.numel()]) for part in parts]
    sums = carried(torch.stack(found).sum(0))
    plain_units = torch.tensor([float(units(whole.numel()))], dtype=torch.float64, device=whole.device)
    return sums, norms_from_square_sums(sums, stats[0], stats[1], plain_units)


@each_value(fmt=[None, E4M3, E5M2, FP16], cuts=[[500], [1, 499], [123, 0, 77, 300], [100] * 5])
def test_squares_add_up_to_the_same_number_over_any_cut_and_in_any_order(cuts, fmt, device):
    def rows(y: torch.Tensor) -> torch.Tensor:
        return y if fmt is None else ScalingTensor(y.to(fmt.dtype), torch.tensor(0.37, device=device))

    x = make("log-normal", (500, 7), device=device)
    x = x if fmt is None else ScalingTensor.quantize(x, fmt).payload.float()
    sums, norm = total([rows(part) for part in x.split(cuts)], rows(x))
    assert sums.dtype == torch.int64
    assert sums.equal(total([rows(x[torch.randperm(500, device=device)])], rows(x))[0])
    assert norm.equal(grad_norm([rows(x)])[None])


@each_value(fmt=[E4M3, E5M2, FP16], bad=[float("nan"), float("inf"), -float("inf")])
def test_an_amax_is_infinite_where_a_value_is_not_finite(bad, fmt, device):
    x = torch.tensor([1.0, bad, 2.0], device=device)
    payload = torch.tensor([1.0, float("nan"), 2.0], device=device).to(fmt.dtype)
    poisoned = ScalingTensor.quantize(x, fmt)
    assert tensor_amaxes([x, poisoned, x.bfloat16(), ScalingTensor(payload, torch.ones((), device=device))]).isposinf().all()


@pytest.mark.parametrize(("norm", "want"), [(0.5, 1.0), (2.0, 1.0 / (2.0 + 1e-6)), (0.0, 1.0)])
def test_the_coefficient(norm, want):
    got = clip_coefficient(torch.tensor(norm, dtype=torch.float64), 1.0)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(want, rel=1e-7)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_clipping_norm_that_is_not_positive_is_refused(bad):
    with pytest.raises(ValueError, match=rf"clipping norm is {bad}; it must be greater than 0"):
        clip_coefficient(torch.ones(()), bad)


def test_clipping_fp8_gradients_is_clipping_what_they_stand_for(device):
    low, plain = gradients(device), [values(g).float() for g in gradients(device)]
    before = [codes(g.payload) for g in low[2:]]
    norm = clip_(low, 0.7)
    want = torch.nn.utils.clip_grad_norm_(parameters(plain), 0.7)
    assert norm.item() == pytest.approx(want.item(), rel=1e-5)
    assert [codes(g.payload).equal(b) for g, b in zip(low[2:], before, strict=True)] == [True] * 3
    for g, w in zip(low, plain, strict=True):
        assert torch.allclose(values(g).float(), w, rtol=1e-2 if g.dtype == torch.bfloat16 else 2e-6)
    assert grad_norm(low).item() == pytest.approx(0.7, rel=1e-3)


@pytest.mark.parametrize("told", [(0, 1, 2, 3), (2,), (3, 0), ()])
def test_gradients_that_were_told_of_are_not_read(told, monkeypatch):
    """Amaxes, scale_invs and squares to the bit; of a scale_inv that is NaN, and of one that clipping has changed, too."""
    low = [ScalingTensor.quantize(make("log-normal", (16, 8), seed=i), E4M3) for i in range(4)]
    low[1].scale_inv.fill_(float("nan"))
    low[2].mul_(torch.tensor(0.3))
    want = first_pass(Tables(torch.device("cpu")), low, [])
    for i in told:
        out, tally = torch.empty(128, dtype=E4M3.dtype), torch.zeros(1, 3, dtype=torch.int64)
        values = low[i].payload.float()
        ops.pack(Tables(values.device), [values], [(0, 0, 128, 0)], out, None, tallies=tally)
        low[i] = ScalingTensor(low[i].payload, low[i].scale_inv, low[i].dtype, tally=tally[0])
    read = []
    real = ops.grad_stats
    monkeypatch.setattr(ops, "grad_stats", lambda tables, gs, **flags: (read.extend(gs), real(tables, gs, **flags))[1])
    stats, sums = first_pass(Tables(torch.device("cpu")), low, [])
    assert bits(stats).equal(bits(want[0]))
    assert sums.equal(want[1])
    assert [id(g) for g in read] == [id(g) for i, g in enumerate(low) if i not in told]
