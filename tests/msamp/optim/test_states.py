"""How optimizer states begin and are stored; masters; and states as they were saved."""

import functools

import pytest
import torch
from torch import nn

from helpers.choices import each_once
from helpers.numerics import COAT_FOLLOWS, KINDS, LARGE, SMALL, check, codes, make, measure
from msamp.kernels.reference import coat_adamw
from msamp.kernels.reference.store import load, store_
from msamp.numerics.formats import BF16, COAT_E4M3, COAT_E5M2, E4M3, E5M2, EXPANDED, FP16, FP32, PLAIN_FP16
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.quantize import quantize
from msamp.numerics.range_expand import Expanded, quantize_expanded
from msamp.numerics.recipe import FP32_STATES, O2, StateFormats
from msamp.numerics.scaling import scale_from_amax
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import FP8AdamW
from msamp.optim.states import (
    CoatFormat,
    PlainFormat,
    ScaledFormat,
    as_stored,
    begun,
    by_key,
    copy_of_rows,
    decoded,
    group_numbers,
    is_own_master,
    is_scaled,
    make_master,
    own_values,
    payload,
    scale_inv,
    state_format,
    stored_bytes,
    view_of_rows,
    weight_format,
)

# ---------------------------------------------------------------------------------------------------------------- plain


@pytest.mark.parametrize("fmt", [FP32, BF16], ids=str)
def test_a_plain_state_begins_at_zero_and_takes_what_is_stored(fmt, device):
    plain = PlainFormat(fmt)
    state = plain.init(torch.ones(3, 5, device=device, dtype=torch.bfloat16))
    assert (state.dtype, state.shape, state.device.type) == (fmt.dtype, (3, 5), device.type)
    assert state.eq(0).all()
    value = make("normal", (3, 5), device=device)
    store_([state], [value], None)
    assert state.equal(value.to(fmt.dtype))
    (loaded,) = load([state])
    assert loaded.dtype == torch.float32
    assert loaded.equal(state.float())


def test_fp32_is_updated_where_it_lies():
    plain = PlainFormat(FP32)
    state = plain.init(torch.ones(4))
    (loaded,) = load([state])
    assert loaded is state
    loaded.add_(1.0)
    store_([state], [loaded], None)
    assert state.eq(1).all()


def test_as_many_states_as_values():
    with pytest.raises(ValueError, match="zip"):
        store_([torch.zeros(1)], [], None)


# --------------------------------------------------------------------------------------------------------------- scaled


every_scaled = pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16], ids=str)


def test_which_class_stores_a_format():
    assert [type(state_format(f)) for f in (FP32, BF16)] == [PlainFormat] * 2
    assert [type(state_format(f)) for f in (FP16, E4M3, E5M2)] == [ScaledFormat] * 3
    assert state_format(E5M2).format is E5M2


@every_scaled
def test_a_state_begins_at_zero_with_scale_one(fmt, device):
    state = state_format(fmt).init(torch.ones(3, 5, device=device))
    assert isinstance(state, ScalingTensor)
    assert (state.format, state.shape, state.device.type) == (fmt, (3, 5), device.type)
    assert state.scale_inv == 1
    (loaded,) = load([state])
    assert loaded.dtype == torch.float32
    assert loaded.eq(0).all()


@every_scaled
def test_the_bound_decides_the_scale_not_the_values(fmt):
    how = state_format(fmt)
    states = [how.init(torch.empty(6, 4)) for _ in range(2)]
    values = [make("normal", (6, 4), seed=s) for s in range(2)]
    bounds = torch.tensor([7.0, 300.0])
    store_(states, values, bounds)
    for state, value, bound in zip(states, values, bounds, strict=True):
        scale = scale_from_amax(bound, fmt.max)
        assert state.scale_inv == 1 / scale
        assert codes(state.payload).equal(codes(quantize(value, scale, fmt)))


@pytest.mark.parametrize("bound", [0.0, float("inf"), float("nan")])
def test_a_bound_that_says_nothing_keeps_the_last_scale(bound):
    how = state_format(E4M3)
    state = how.init(torch.empty(4))
    store_([state], [torch.ones(4)], torch.tensor([10.0]))
    assert state.scale_inv == 1 / 32
    store_([state], [torch.zeros(4)], torch.tensor([bound]))
    assert state.scale_inv == 1 / 32


@each_once(2.0, kind=KINDS, shape=[SMALL, LARGE])
def test_states_against_fp32_three_ways(kind, shape, device):
    weight = make("normal", shape, seed=9, device=device) * 0.02
    low, plain = nn.Parameter(ScalingTensor.quantize(weight, FP16)), nn.Parameter(weight.clone())
    nearest = O2.with_rounding(master="nearest", moments="nearest").states  # stochastic rounding has three decibels more noise
    optimizers = FP8AdamW([low], formats=nearest), FP8AdamW([plain], formats=FP32_STATES)
    for step in range(5):
        g = make(kind, shape, seed=step, device=device) * 1e-3
        low.grad, plain.grad = g, g.clone()
        for optimizer in optimizers:
            optimizer.step()
    got, want = optimizers[0].state[low], optimizers[1].state[plain]
    check("m", "fp8-e4m3", kind, shape, measure(want["exp_avg"], got["exp_avg"].dequantize(), got["exp_avg"].payload, E4M3))
    check("v", "fp16", kind, shape, measure(want["exp_avg_sq"], got["exp_avg_sq"].dequantize(), got["exp_avg_sq"].payload, FP16))
    check("master", "fp16", kind, shape, measure(plain, low.dequantize(), low.payload, FP16))


# --------------------------------------------------------------------------------------------------------------- COAT's


SHAPE = (24, 300)
COAT_FORMATS = StateFormats(m=COAT_E4M3, v=COAT_E4M3)


@pytest.mark.parametrize("fmt", EXPANDED, ids=str)
@pytest.mark.parametrize(("shape", "groups"), [((4, 256), (4, 2)), ((2, 3, 129), (2, 3, 2)), ((5,), (1,)), ((), (1,)), ((0, 4), (0, 1))])
def test_a_state_begins_at_zero_with_exponents_of_one(fmt, shape, groups, device):
    how, weight = state_format(fmt), torch.ones(shape, device=device)
    assert isinstance(how, CoatFormat)
    state = {"exp_avg": how.init(weight)} | {f"exp_avg{name}": x for name, x in how.beside(weight).items()}
    assert {key: (x.shape, x.dtype, x.device.type) for key, x in state.items()} == {
        "exp_avg": (shape, fmt.dtype, device.type),
        "exp_avg_max": (groups, torch.float32, device.type),
        "exp_avg_k": (groups, torch.float32, device.type),
    }
    assert sum(x.nbytes for x in state.values()) == fmt.bytes_of(shape)
    stored, zeros = as_stored(state, "exp_avg"), quantize_expanded(torch.zeros(shape), fmt)
    assert isinstance(stored, Expanded)
    assert (codes(stored.payload).tolist(), stored.max.tolist(), stored.k.tolist()) == (
        codes(zeros.payload).tolist(),
        zeros.max.tolist(),
        zeros.k.tolist(),
    )


def test_other_states_are_what_they_are():
    x = torch.zeros(3)
    assert as_stored({"exp_avg": x}, "exp_avg") is x


@pytest.mark.parametrize("name", ["master", "grad"])
def test_only_moments_may_be_coat_s(name):
    with pytest.raises(ValueError, match=rf"{name} is coat-e4m3, a format for the moments m and v only; choose one of fp32, bf16, fp16"):
        StateFormats(**{name: COAT_E4M3})


def test_a_weight_keeps_its_formats_and_counts_one_byte_and_a_sixteenth():
    p = nn.Parameter(make("normal", (16, 256)))
    optimizer = FP8AdamW([p], formats=StateFormats(m=COAT_E4M3, v=COAT_E5M2))
    p.grad = make("normal", p.shape, seed=1)
    optimizer.step()
    state = optimizer.state[p]
    assert [state[key].dtype for key in ("exp_avg", "exp_avg_sq")] == [torch.float8_e4m3fn, torch.float8_e5m2]
    sizes = [sum(state[key + name].nbytes for name in ("", "_max", "_k")) / p.numel() for key in ("exp_avg", "exp_avg_sq")]
    assert sizes == [1 + 8 / 128] * 2


class Regression:
    """A small network that learns a random one of its own shape; channels of its input are of different sizes, as activations' are."""

    def __init__(self, formats: StateFormats, **settings: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 160), nn.Tanh(), nn.Linear(160, 16))
        self.teacher = nn.Sequential(nn.Linear(256, 160), nn.Tanh(), nn.Linear(160, 16)).requires_grad_(False)
        self.optimizer = FP8AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, formats=formats)
        self.sizes = torch.logspace(-1.5, 0.5, 256)
        self.losses: list[float] = []

    def run(self, steps: int) -> "Regression":
        for step in range(steps):
            x = make("normal", (64, 256), seed=step) * self.sizes
            loss = (self.model(x) - self.teacher(x)).square().mean()
            self.losses.append(loss.item())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


@pytest.mark.nightly
def test_it_learns_as_fp32_does_over_300_steps():
    exact, coat = (Regression(formats).run(300).losses for formats in (FP32_STATES, COAT_FORMATS))
    assert sum(exact[-50:]) < 0.25 * sum(exact[:50])
    assert sum(coat[-50:]) == pytest.approx(sum(exact[-50:]), rel=0.02)
    assert max(abs(a - b) / a for a, b in zip(exact, coat, strict=True)) < 0.1


def followed(expand: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float, float]:
    """SQNR in dB of v, of m and of the way that the weights went, against FP32, after 200 steps with the same gradients."""
    monkeypatch.setattr(coat_adamw, "quantize_expanded", functools.partial(quantize_expanded, expand=expand))
    sizes = torch.logspace(-3, 0, 24).view(24, 1)
    start = make("normal", SHAPE, seed=99)
    plain, coat = (nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [
        FP8AdamW([p], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, formats=f) for p, f in ((plain, FP32_STATES), (coat, COAT_FORMATS))
    ]
    for step in range(200):
        for p in (plain, coat):
            p.grad = make("normal", SHAPE, seed=step) * sizes
        for optimizer in optimizers:
            optimizer.step()
    exact, state = (optimizer.state[p] for optimizer, p in zip(optimizers, (plain, coat), strict=True))
    found = [sqnr_db(exact[key], as_stored(state, key).dequantize()) for key in ("exp_avg_sq", "exp_avg")]
    return (*found, sqnr_db(plain - start, coat - start))


def test_expansion_is_worth_its_bytes_above_all_for_v(monkeypatch):
    expanded, plain = followed(True, monkeypatch), followed(False, monkeypatch)
    for got, least in zip(expanded, COAT_FOLLOWS, strict=True):
        assert got > least
    for better, worse, gain in zip(expanded, plain, (15, 4, 5), strict=True):
        assert better > worse + gain


# ------------------------------------------------------------------------------------------------- of any stored state


def test_what_can_be_asked_of_any_stored_state():
    x = make("normal", (6, 300))
    plain, scaled, grouped = x.bfloat16(), ScalingTensor.quantize(x, E4M3), quantize_expanded(x, COAT_E4M3)
    assert [stored_bytes(y) for y in (plain, scaled, grouped)] == [2 * x.numel(), x.numel(), x.numel() + 6 * 3 * 8]
    assert [is_scaled(y) for y in (plain, scaled, grouped)] == [False, True, False]
    assert [payload(y).dtype for y in (plain, scaled, grouped)] == [torch.bfloat16, E4M3.dtype, E4M3.dtype]
    assert [scale_inv(y) is None for y in (plain, scaled, grouped)] == [True, False, True]
    assert [group_numbers(y) is None for y in (plain, scaled, grouped)] == [True, True, False]
    for y in (plain, scaled, grouped):
        rows = copy_of_rows(y, slice(2, 5))
        assert own_values(rows).equal(own_values(y)[2:5])
        assert own_values(y).dtype == torch.float32
    assert decoded(plain) is plain
    assert decoded(grouped).equal(grouped.dequantize())


def test_values_of_their_own_share_no_memory():
    x = torch.ones(4)
    own_values(x).add_(1.0)
    copy_of_rows(torch.tensor(1.0), slice(0, 1)).add_(1.0)
    assert x.eq(1).all()


def test_a_view_of_rows_is_the_parameter_s_memory_with_a_scale_of_its_own():
    p = nn.Parameter(ScalingTensor.quantize(make("normal", (6, 4)), E4M3))
    view = view_of_rows(p, slice(2, 4))
    view.payload.view(torch.uint8).zero_()
    view.scale_inv.mul_(2.0)
    assert codes(p.payload)[2:4].eq(0).all()
    assert p.scale_inv * 2 == view.scale_inv


@pytest.mark.parametrize("fmt", [FP32, E4M3, COAT_E5M2], ids=str)
def test_a_state_is_taken_apart_as_it_is_put_together(fmt):
    state = begun("trace", fmt, torch.ones(3, 200))
    assert by_key("trace", as_stored(state, "trace")).keys() == state.keys()
    assert own_values(as_stored(state, "trace")).eq(0).all()


# -------------------------------------------------------------------------------------------------------------- masters


SCALED, PLAIN = (FP16, E4M3, E5M2), (FP32, BF16, PLAIN_FP16)


def parameter(fmt) -> nn.Parameter:
    x = make("normal", (16, 8))
    return nn.Parameter(ScalingTensor.quantize(x, fmt) if fmt.scaled else x.to(fmt.dtype))


@pytest.mark.parametrize("fmt", [*SCALED, *PLAIN], ids=str)
@pytest.mark.parametrize("master", [*SCALED, *PLAIN], ids=str)
def test_a_parameter_in_the_master_s_format_needs_no_copy(fmt, master):
    assert weight_format(parameter(fmt)) is fmt
    assert is_own_master(parameter(fmt), master) == (fmt is master)


@pytest.mark.parametrize("fmt", [*SCALED, *PLAIN], ids=str)
@pytest.mark.parametrize("master", [*SCALED, FP32, BF16], ids=str)
def test_a_copy_holds_the_parameter_s_values(fmt, master):
    p = parameter(fmt)
    copy = make_master(p, master)
    values = p.dequantize(torch.float32) if fmt.scaled else p.detach().float()
    if master.scaled:
        assert torch.equal(copy, ScalingTensor.quantize(values, master))
    else:
        assert copy.equal(values.to(master.dtype))
    assert not copy.requires_grad


@pytest.mark.parametrize("master", [FP16, FP32], ids=str)
def test_a_copy_may_start_from_what_the_parameter_was(master):
    values = make("normal", (16, 8))
    p = nn.Parameter(ScalingTensor.quantize(values, E4M3))
    copy = make_master(p, master, values)
    back = copy.dequantize() if master.scaled else copy
    assert (back - values).norm() < 1e-3 * values.norm() < (p.dequantize() - values).norm()


def test_a_master_never_shares_memory_with_its_parameter():
    p = nn.Parameter(torch.ones(4))
    make_master(p, FP32).add_(1.0)
    assert p.detach().eq(1).all()
