from dataclasses import replace

import pytest
import torch
from torch import nn

from msamp.numerics.formats import BF16, E4M3, FP32
from msamp.numerics.recipe import COLLAGE_PLUS, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import LowPrecisionOptimizer

FOUR_BF16 = StateFormats(BF16, BF16, BF16, BF16, "plus")


def test_an_update_in_bf16_takes_nothing_else():
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(
        ValueError, match="update 'plus' computes in BF16, but the formats are master bf16, grad bf16, m bf16, v fp32; set all four"
    ):
        LowPrecisionOptimizer([p], formats=replace(FOUR_BF16, v=FP32))
    with pytest.raises(ValueError, match="decoupled is False; update 'plus' only supports decoupled decay"):
        LowPrecisionOptimizer([p], formats=FOUR_BF16, decoupled=False)
    for wrong, kind in (
        (torch.ones(2), "torch.float32"),
        (ScalingTensor.quantize(torch.ones(2), E4M3, dtype=torch.bfloat16), "a ScalingTensor"),
    ):
        with pytest.raises(ValueError, match=f"a parameter is {kind}; update 'plus' requires plain torch.bfloat16"):
            LowPrecisionOptimizer([nn.Parameter(wrong)], formats=COLLAGE_PLUS.states)
