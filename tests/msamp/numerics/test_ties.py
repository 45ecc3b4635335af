"""Masters that begin midway between two FP8 codes: nothing that can be read changes, and the first step has the size of its rate."""

from typing import Any

import pytest
import torch
from torch import nn

import msamp
from msamp.numerics.formats import E4M3, FP16
from msamp.numerics.tensor import ScalingTensor, fp32_values

RATE = 1e-5


def begun(layer: nn.Module, level: str) -> tuple[torch.Tensor, Any]:
    """The optimizer of an initialized layer, and the values of its weight's master."""
    _, optimizer = msamp.initialize(layer, torch.optim.AdamW(layer.parameters(), lr=RATE, weight_decay=0.0), level)
    return optimizer, lambda: fp32_values(optimizer.state.get(layer.weight, {}).get("master", layer.weight)).clone()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "coat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_in_bf16_keeps_codes_and_bf16_and_its_first_step_has_the_size_of_its_rate(level: str, dtype: torch.dtype):
    layer, x = nn.Linear(512, 256, bias=False, dtype=dtype), torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    values = (x.sign() * (x.abs() + 0.05) ** 4 / 16).bfloat16().float()  # a quarter of them below the smallest normal code
    layer.weight.data.copy_(values)
    optimizer, master = begun(layer, level)
    first, codes = master(), ScalingTensor.quantize(values, E4M3)
    assert 0.03 < (first != values).float().mean() < 0.1
    assert first.bfloat16().float().equal(values)
    assert ScalingTensor.quantize(first, E4M3).equal(codes)
    assert level in ("O1", "O2") or layer.weight.payload.view(torch.uint8).equal(codes.payload.view(torch.uint8))
    layer.weight.grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).sign().to(dtype)
    optimizer.step()
    moved = codes.dequantize() - ScalingTensor.quantize(master(), E4M3, 1 / codes.scale_inv).dequantize()
    along = float((moved * layer.weight.grad.float()).mean()) / RATE
    assert 0.8 < along < 1.4, "2.8 with masters midway, of which FP16 rounds most steps away, and 58 at COAT"
    for given in (values, first):  # an export in FP32 is off BF16's grid, and is kept
        layer.load_state_dict({"weight": given})
        assert level in ("O3", "coat") or master().equal(first), "the draw depends on value and index alone"


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_weights_off_the_grid_of_bf16_and_frozen_ones_keep_all_their_bits(level: str):
    for layer in (nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False).bfloat16().float()):
        values, trained = ScalingTensor.quantize(layer.weight.detach().clone(), FP16).dequantize(), layer.weight.requires_grad
        off = (begun(layer, level)[1]() - values).abs()
        # Beside FP8 weights no master is rounded to midway between two codes, as one value in 128 would be: it takes the next value.
        assert (off <= (values.abs() * 2.0**-10 if level == "O3" and trained else 0.0)).all()
        assert (off > 0).float().mean() < 0.02
