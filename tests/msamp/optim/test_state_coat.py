"""COAT's states: their shapes and keys; and that an optimizer with them follows one in FP32, better than without expansion."""

import functools

import pytest
import torch
from numerics import COAT_FOLLOWS, codes, make
from torch import nn

from msamp.kernels.reference import coat_adamw
from msamp.numerics.formats import COAT, COAT_E4M3, COAT_E5M2
from msamp.numerics.metrics import sqnr_db
from msamp.numerics.range_expand import Expanded, quantize_expanded
from msamp.numerics.recipe import FP32_STATES, StateFormats
from msamp.optim.adamw import FP8AdamW
from msamp.optim.state_coat import CoatFormat, as_stored
from msamp.optim.state_fp8 import state_format

SHAPE = (24, 300)
COAT_FORMATS = StateFormats(m=COAT_E4M3, v=COAT_E4M3)


@pytest.mark.parametrize("fmt", COAT, ids=str)
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
