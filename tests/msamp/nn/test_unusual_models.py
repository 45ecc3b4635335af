"""No low-precision layer gives a second derivative that is silently wrong."""

import copy
import pickle

import pytest
import torch
from torch import nn

import msamp
from helpers.fsdp_nets import everything
from helpers.numerics import make
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import ScalingState
from msamp.nn.transformer_block import TransformerBlock

REFUSED = r"create_graph=True reached {}, which has no second derivative.*exclude_names"
functional = torch.autograd.functional


def ends_in_fp8() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))
    return msamp.initialize(model, None, recipe="O2")[0]


SECOND = {
    "hvp": lambda f, x: functional.hvp(f, x, torch.ones_like(x)),
    "vhp": lambda f, x: functional.vhp(f, x, torch.ones_like(x)),
    "jvp": lambda f, x: functional.jvp(f, x, torch.ones_like(x)),
    "hessian": lambda f, x: functional.hessian(f, x),
    "hvp with a graph": lambda f, x: functional.hvp(f, x.requires_grad_(), torch.ones_like(x), create_graph=True),
    "grad of grad, unused allowed": lambda f, x: torch.autograd.grad(
        torch.autograd.grad(f(x.requires_grad_()), x, create_graph=True)[0].sum(), x, allow_unused=True
    ),
    "penalty": lambda f, x: (torch.autograd.grad(f(x.requires_grad_()), x, create_graph=True)[0].norm() - 1).square().backward(),
}


@pytest.mark.promise("Conversion", "Second derivatives through FP8 layers are refused, wherever the layer stands.")
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_refused(name):
    model = ends_in_fp8()
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match=REFUSED.format(r"2\.weight")):
            SECOND[name](lambda x, each=each: each(x).sum(), make("normal", (2, 32)))


def test_a_first_derivative_in_the_middle_of_one_is_taken():
    model, x = ends_in_fp8(), make("normal", (2, 32))
    assert functional.vjp(lambda x: model(x).sum(), x)[1].abs().sum() > 0
    assert functional.jacobian(lambda x: model(x).sum(0), x).abs().sum() > 0


def test_layers_that_a_filter_keeps_have_second_derivatives():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))
    x, f = make("normal", (2, 32)), lambda x: model(x).sum()
    want = functional.hvp(f, x, torch.ones_like(x))[1]
    kept = msamp.filters.all_of(msamp.filters.DEFAULT, msamp.filters.exclude_names(r"^[02]$"))
    with pytest.warns(UserWarning, match="converted no layer"):
        msamp.initialize(model, None, recipe="O2", accept=kept)
    assert functional.hvp(f, x, torch.ones_like(x))[1].equal(want)


# What users do around a layer that must not poison it: skipped steps, evaluation in inference mode, replaced weights, hooks.


def filled() -> tuple[FP8Linear, ScalingState]:
    """A layer whose scaling window is full."""
    torch.manual_seed(0)
    layer = FP8Linear(32, 32)
    state = ScalingState(layer)
    for _ in range(17):
        layer(torch.randn(8, 32)).sum().backward()
        state.roll()
    assert layer.scaling.delayed
    return layer, state


def test_a_loop_that_skips_its_own_step_goes_on():
    layer, _ = filled()
    bad = torch.randn(8, 32)
    bad[0, 0] = float("inf")
    assert not layer(bad).isfinite().all()
    assert layer(torch.randn(8, 32)).isfinite().all()  # without a roll between


def test_gradscaler_recovers_after_one_overflow():
    torch.manual_seed(0)
    model, optimizer = msamp.initialize(nn.Sequential(nn.Linear(32, 32)), None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(24):
        x = torch.randn(16, 32)
        if step == 20:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(p.isfinite().all() for p in (model[0].weight.dequantize(), model[0].bias))


def test_evaluation_in_inference_mode_leaves_training_alone():
    layer = FP8Linear(32, 32)
    x = torch.randn(4, 32)
    with torch.inference_mode():
        seen = layer(x)
        layer.load_state_dict(layer.state_dict())
        assert FP8Linear(32, 32)(x).isfinite().all()
    trained = layer(x)
    trained.sum().backward()
    assert torch.equal(seen, trained.detach())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_encoder_trains_and_evaluates(masked: bool, norm_first: bool):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    model, optimizer = msamp.initialize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(3, 6, 32)
    mask = torch.arange(6).expand(3, 6) >= torch.tensor([[6], [4], [5]]) if masked else None
    model(x, src_key_padding_mask=mask).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        trained = model(x, src_key_padding_mask=mask)
        evaluated = model.eval()(x, src_key_padding_mask=mask)
    keep = ~mask if mask is not None else torch.ones(3, 6, dtype=torch.bool)
    torch.testing.assert_close(evaluated[keep], trained[keep])


# `msamp.initialize(smooth_swiglu=True)`: which layers get channel scales, in one's own loop, and what is refused.


class Gated(nn.Module):
    """An MLP as Llama's."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down_proj, self.act_fn = nn.Linear(96, 64, bias=False), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def trained(model: nn.Module, shape: tuple[int, ...], steps: int = 18, **options) -> tuple[nn.Module, list[float]]:
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "O2", accept=everything, **options)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("kind", ["block", "gated"])
def test_channels_get_scales_and_the_loss_stays(kind):
    torch.manual_seed(0)
    plain = TransformerBlock(64, 4, 96) if kind == "block" else Gated(nn.SiLU())
    shape = (8, 2, 64) if kind == "block" else (32, 64)
    model, smooth = trained(copy.deepcopy(plain), shape, smooth_swiglu=True)
    scaling = (model.fc2 if kind == "block" else model.down_proj).scaling
    assert scaling.channels.features == 96
    assert float(scaling.channels.peak.max()) > 0
    assert len([module for module in model.modules() if getattr(module, "channels", None) is not None]) == 1
    without, losses = trained(plain, shape)
    assert smooth == pytest.approx(losses, rel=0.02)
    state = model.state_dict()
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    assert torch.equal((other.fc2 if kind == "block" else other.down_proj).scaling.channels.peak, scaling.channels.peak)
    assert not [name for name in msamp.plain_state_dict(model) if "channels" in name]
    assert without is not model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.Linear(64, 64)), {}, r"\(none found\); leave it out"),
        (Gated(nn.GELU()), {}, r"\(none found\); leave it out"),
        (Gated(nn.SiLU()), {"accept": lambda name, layer: name != "down_proj"}, "1 found, none of them in FP8: widen `accept`"),
        (Gated(nn.SiLU()), {"recipe": "bf16"}, "applies to FP8 linear layers, and recipe 'bf16' has none"),
        (Gated(nn.SiLU()), {"fp8_recipe": "blockwise"}, "Smooth-SwiGLU requires operands with one delayed scale per tensor"),
    ],
)
def test_refused_before_anything_is_converted(model, options, message):
    with pytest.raises(ValueError, match=message):
        msamp.initialize(model, **{"recipe": "O2", "accept": everything} | options, smooth_swiglu=True)
    assert all(type(layer) is nn.Linear for layer in model.modules() if isinstance(layer, nn.Linear))
