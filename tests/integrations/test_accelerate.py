"""What accelerate saves of a low-precision model."""

import os
from unittest import mock

import pytest
import torch
from torch import nn

import msamp
from helpers import hosts

accelerate = hosts.need("accelerate")


@pytest.fixture(autouse=True)
def environment_as_before():
    """accelerate tells it of its ranks, and reads it."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of tests before these
    with mock.patch.dict(os.environ):
        yield


def trained(level: str, plain: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    if plain:
        msamp.save_plain(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_models_and_states_are_saved_and_loaded(level, tmp_path):
    from safetensors.torch import load_file

    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*trained(level))
    accelerator.backward(model(torch.randn(16, 32)).square().mean())
    optimizer.step()
    want = msamp.plain_state_dict(model, optimizer.optimizer)
    accelerator.save_model(model, str(tmp_path / "model"))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert sorted(saved) == sorted(want)
    assert all(saved[name].equal(want[name]) for name in want)
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.allclose(msamp.plain_state_dict(model, optimizer.optimizer)["0.weight"], want["0.weight"], rtol=0.07, atol=1e-3)


@pytest.mark.promise("Hosts", "safetensors refuses exact low-precision weights before writing; pickle saves them bit for bit.")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_exact_weights_are_saved_by_pickle_and_safetensors_refuses_them_with_the_way_out(level, tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*trained(level, plain=False))
    for save in (accelerator.save_state, lambda folder: accelerator.save_model(model, folder)):
        with pytest.raises(ValueError, match=r"msamp\.save_plain\(model, optimizer\) once.*safe_serialization=False"):
            save(str(tmp_path / "refused"))
    assert not list(tmp_path.rglob("*.safetensors"))
    x, losses = torch.randn(16, 32), []
    accelerator.save_state(str(tmp_path / "exact"), safe_serialization=False)
    for _ in range(2):
        for _ in range(3):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.load_state(str(tmp_path / "exact"))
    assert losses[:3] == losses[3:]
