"""How the update is launched. Its numbers: tests/msamp/optim/test_optimizer.py and tests/msamp/kernels."""

import pytest
import torch
from torch import nn

from msamp.numerics.formats import COAT_E4M3, E4M3, FP16, FP32
from msamp.numerics.recipe import StateFormats
from msamp.optim.optimizer import FP8AdamW
from msamp.optim.updates import adamw


@pytest.mark.parametrize(("m", "v", "coat"), [(E4M3, FP16, False), (COAT_E4M3, FP32, True), (FP32, COAT_E4M3, True)], ids=str)
def test_coat_s_moments_have_a_kernel_of_their_own(m, v, coat, monkeypatch):
    ran = []
    monkeypatch.setattr(adamw.ops, "adamw", lambda *_, **__: ran.append(False))
    monkeypatch.setattr(adamw.ops, "coat_adamw", lambda *_, **__: ran.append(True))
    p = nn.Parameter(torch.ones(4, 128))
    p.grad = torch.ones_like(p)
    FP8AdamW([p], formats=StateFormats(FP32, FP32, m, v)).step()
    assert ran == [coat]
