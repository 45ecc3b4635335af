"""How optimizer states begin and are stored; masters; and states as they were saved."""

import dataclasses
import functools
import warnings

import pytest
import torch
from torch import nn

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
    _warn_once,
    as_stored,
    begun,
    by_key,
    check_state,
    copy_of_rows,
    decoded,
    expected_moment,
    group_numbers,
    is_own_master,
    is_scaled,
    make_master,
    own_values,
    parameter_names,
    payload,
    saved_states,
    scale_inv,
    state_format,
    stored_bytes,
    take_groups,
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


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
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
    with pytest.raises(ValueError, match=rf"{name} is coat-e4m3, which is for the moments m and v alone; choose one of fp32, bf16, fp16"):
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


# ------------------------------------------------------------------------------------------------------- what was saved


def trained(**options) -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, momentum=0.9, **options)
    for p in params[::2]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_states_come_back_as_they_were_saved_by_number_of_parameter_and_the_groups_are_taken_over():
    saved = trained().state_dict()
    saved["state"][0]["momentum_buffer"] = torch.full((3,), 1.001)  # FP32 beside a BF16 parameter
    saved["param_groups"][1]["lr"] = 0.5
    optimizer = trained()
    found = saved_states(optimizer, saved, "momentum")
    assert list(found) == [0, 2]
    assert found[0]["momentum_buffer"] is saved["state"][0]["momentum_buffer"]
    assert len(optimizer.state) == 2
    groups = list(optimizer.param_groups)
    take_groups(optimizer, saved)
    assert not optimizer.state
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert all(group is known for group, known in zip(optimizer.param_groups, groups, strict=True)), "a scheduler holds them"


def test_another_option_is_refused_before_anything_changes():
    optimizer, saved = trained(), trained(nesterov=True).state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    message = "parameter group 0 was saved with nesterov True, this optimizer has False; build it with the saved nesterov, or"
    with pytest.raises(ValueError, match=message):
        saved_states(optimizer, saved, "nesterov")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 2
    del saved["param_groups"][0]["nesterov"]
    with pytest.raises(ValueError, match="saved with nesterov None"):
        saved_states(optimizer, saved, "nesterov")


def test_other_numbers_and_names_of_parameters_are_refused():
    def named(*names: str) -> torch.optim.Optimizer:
        return torch.optim.SGD([(name, nn.Parameter(torch.ones(3))) for name in names], lr=0.1)

    assert parameter_names(named("a", "b")) == ["a", "b"]
    assert parameter_names(trained())[:2] == ["parameter 0 of group 0", "parameter 0 of group 1"]
    saved_states(named("a", "b"), named("a", "b").state_dict(), "momentum")
    with pytest.raises(ValueError, match="parameter group 0 was saved with b where this optimizer has a; build the optimizer as"):
        saved_states(named("a", "b"), named("b", "a").state_dict(), "momentum")
    with pytest.raises(ValueError, match="parameter group 0 was saved with 1 parameters, this optimizer has 2"):
        saved_states(named("a", "b"), named("a").state_dict(), "momentum")


WHOLE = torch.Size((4, 256))


def state_of(fmt) -> dict[str, torch.Tensor]:
    return begun("exp_avg_sq", fmt, torch.ones(WHOLE))


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16, E4M3, E5M2, COAT_E4M3, COAT_E5M2], ids=str)
def test_a_saved_state_is_held_to_its_format_and_shape(fmt):
    expected = expected_moment("exp_avg_sq", fmt, WHOLE, non_negative=True)
    check_state("w", state_of(fmt), expected)
    for other in (FP32, BF16, FP16, E4M3, E5M2, COAT_E4M3, COAT_E5M2):
        if other != fmt:
            with pytest.raises(ValueError, match=r"the state of w (lacks|has unknown)|exp_avg_sq of w is torch\.\w+.*this optimizer keeps"):
                check_state("w", state_of(other), expected)
    for shape in ((256, 4), (4, 255), (4, 256, 1)):
        with pytest.raises(ValueError, match=r"of w is torch.*this optimizer keeps"):
            check_state("w", begun("exp_avg_sq", fmt, torch.ones(shape)), expected)
    with pytest.raises(ValueError, match="exp_avg_sq of w is a list, and this optimizer keeps"):
        check_state("w", state_of(fmt) | {"exp_avg_sq": [0.0]}, expected)
    with pytest.raises(ValueError, match="the state of w lacks exp_avg_sq"):
        check_state("w", {}, expected)
    check_state("w", {}, expected, whole=False)


def stored(values: torch.Tensor, fmt) -> torch.Tensor:
    return ScalingTensor.quantize(values, fmt) if fmt.scaled else values.to(fmt.dtype)


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16, E4M3, E5M2], ids=str)
def test_a_saved_state_is_held_to_what_it_can_hold(fmt):
    expected = expected_moment("exp_avg_sq", fmt, WHOLE, non_negative=True)
    bad = make("normal", WHOLE).abs()
    bad[1, 2] = -1.0
    with pytest.raises(ValueError, match=r"exp_avg_sq of w holds -.*, and cannot be less than 0"):
        check_state("w", {"exp_avg_sq": stored(bad, fmt)}, expected)
    check_state("w", {"exp_avg_sq": stored(bad, fmt)}, expected_moment("exp_avg_sq", fmt, WHOLE, non_negative=False))
    x = stored(bad.abs(), fmt)
    payload(x).flatten()[:2] = torch.tensor(float("nan")).to(fmt.dtype)
    with pytest.raises(ValueError, match="exp_avg_sq of w holds 2 values that are NaN or infinite"):
        check_state("w", {"exp_avg_sq": x}, expected)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 2.0**127])
def test_a_scale_that_no_state_can_have_is_refused(scale):
    x = stored(make("normal", WHOLE), E4M3)
    x.scale_inv.fill_(scale)
    with pytest.raises(ValueError, match=r"which must be finite and above 0|values that are NaN or infinite"):
        check_state("w", {"exp_avg": x}, expected_moment("exp_avg", E4M3, WHOLE, non_negative=False))


@pytest.mark.parametrize(("key", "value"), [("_max", -1.0), ("_max", float("nan")), ("_k", 0.0), ("_k", float("inf"))])
def test_numbers_of_groups_that_cannot_be_are_refused(key, value):
    state = state_of(COAT_E4M3)
    state[f"exp_avg_sq{key}"][0, 0] = value
    with pytest.raises(ValueError, match=f"exp_avg_sq{key} of w holds"):
        check_state("w", state, expected_moment("exp_avg_sq", COAT_E4M3, WHOLE, non_negative=True))


@pytest.mark.parametrize(
    ("states", "told"), [({"v": E4M3}, "v in fp8-e4m3 .* give fp16 or coat-e4m3"), ({"master": E4M3}, "a master in fp8")]
)
def test_formats_that_a_training_was_seen_to_fail_with_are_told_once(states, told):
    _warn_once.cache_clear()
    formats = dataclasses.replace(O2.states, **states)
    with pytest.warns(UserWarning, match=told):
        FP8AdamW([nn.Parameter(torch.zeros(4, 4))], formats=formats)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FP8AdamW([nn.Parameter(torch.zeros(4, 4))], formats=formats)
        for silent in (O2.states, dataclasses.replace(O2.states, v=COAT_E4M3), dataclasses.replace(O2.states, m=E5M2, v=E5M2)):
            FP8AdamW([nn.Parameter(torch.zeros(4, 4))], formats=silent)
