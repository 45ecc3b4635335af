"""What accelerate saves of a low-precision model."""

import pytest
import torch
from torch import nn

import msamp

accelerate = pytest.importorskip("accelerate")


def trained(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
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
