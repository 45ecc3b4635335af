"""What users do around a layer that must not poison it: skipped steps, evaluation in inference mode, replaced weights, hooks."""

import pytest
import torch
from torch import nn

import msamp
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import ScalingState


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
    trained = layer(x)
    trained.sum().backward()
    assert torch.equal(seen, trained.detach())
    with torch.inference_mode():
        assert FP8Linear(32, 32)(x).isfinite().all()


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
