"""MS-AMP's names do what they did, or say what to write instead."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import msamp
from msamp import compat
from msamp.nn.linear import FP8Linear
from msamp.numerics.formats import E4M3, E5M2, FP16

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "moving.md"


class Net(nn.Module):
    """As MS-AMP's examples/mnist.py has it, at a size for a test: convolutions, dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(144, 32)
        self.fc2 = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.flatten(nn.functional.max_pool2d(self.conv(x).relu(), 2), 1)
        return self.fc2(self.fc1(self.dropout(x)).relu()).log_softmax(1)


@pytest.mark.parametrize("level", compat.opt_levels)
def test_a_loop_as_its_mnist_example_has_it(level):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = msamp.initialize(model, optimizer, opt_level=level)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    target, losses = torch.arange(64) % 10, []
    data = torch.randn(10, 1, 14, 14)[target] + 0.1 * torch.randn(64, 1, 14, 14)
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(data)
        loss = nn.functional.nll_loss(output.float(), target)
        scaler.scale(loss).backward()
        compat.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize(("name", "theirs"), [("LBAdamW", torch.optim.AdamW), ("LBAdam", torch.optim.Adam)])
def test_its_optimizers_are_adam_s_with_moments_in_the_dtypes_asked(name, theirs):
    start, gradient = (torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    low = getattr(compat, name)([p], weight_decay=0.1)
    reference = theirs([q], weight_decay=0.1)
    for _ in range(3):
        p.grad, q.grad = gradient.clone(), gradient.clone()
        low.step()
        reference.step()
    assert (p - q).abs().amax() < 5e-3
    assert low.state[p]["exp_avg"].format is E4M3
    assert low.state[p]["exp_avg_sq"].format is FP16
    plain = getattr(compat, name)([p], exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32)
    assert plain.param_groups[0]["formats"]["m"] == "fp32"


@pytest.mark.parametrize("option", [{"bias_correction": False}, {"amsgrad": True}, {"maximize": True}, {"tensor_scale": False}])
def test_what_its_optimizer_had_and_ours_has_not_is_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} is"):
        compat.LBAdamW([nn.Parameter(torch.ones(2))], **option)


def test_dtypes_and_layers():
    with pytest.raises(ValueError, match=r"exp_avg_dtype is torch\.bfloat16; choose one of torch\.uint8"):
        compat.LBAdamW([nn.Parameter(torch.ones(2))], exp_avg_dtype=torch.bfloat16)
    for qtype in (compat.Dtypes.kfloat16, compat.Dtypes.kfloat8_e4m3):
        model = compat.LinearReplacer.replace(nn.Sequential(nn.Linear(32, 32)), qtype)
        assert type(model[0]) is FP8Linear
        assert model[0].weight.format is qtype
    with pytest.raises(ValueError, match=r"choose Dtypes\.kfloat16"):
        compat.LinearReplacer.replace(nn.Linear(32, 32), E5M2)
    with pytest.raises(ValueError, match="does not broadcast weights"):
        compat.LinearReplacer.replace(nn.Linear(32, 32), src_rank=1)
    with pytest.raises(ValueError, match=r"ScalingMeta is not supported: msamp\.ScalingTensor\.quantize"):
        compat.ScalingMeta(E4M3)


def test_clipping_takes_the_2_norm_and_finds_what_is_not_finite():
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    assert compat.clip_grad_norm_([p], 1.0, norm_type=2) == 5.0
    with pytest.raises(ValueError, match="norm_type is 1"):
        compat.clip_grad_norm_([p], 1.0, norm_type=1)
    p.grad = torch.tensor([torch.inf, 0.0])
    with pytest.raises(RuntimeError, match=r"the gradient norm is (inf|nan)"):
        compat.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


def test_import_msamp_does_not_load_it():
    code = "import sys, msamp; assert 'msamp.compat' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(Path(msamp.__file__).parents[1])})


def test_the_guide_names_what_is_here():
    text = GUIDE.read_text(encoding="utf-8")
    for name in ("opt_levels", "clip_grad_norm_", "LBAdamW", "LBAdam", "LinearReplacer", "Dtypes", "ScalingMeta"):
        assert name in text
        assert hasattr(compat, name)
