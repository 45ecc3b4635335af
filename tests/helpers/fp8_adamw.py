"""What the tests of LowPrecisionOptimizer share: the formats of FP8-LM's Table 6, a parameter, and all bits of an optimizer."""

import torch
from torch import nn

from helpers.numerics import bytes_of, make
from msamp.numerics.formats import BF16, COAT_E4M3, COAT_E5M2, E4M3, FP16
from msamp.numerics.recipe import FP32_STATES, O1, O2
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.optimizer import LowPrecisionOptimizer

TABLE6 = {
    "#0": FP32_STATES,
    "#1": FP32_STATES,  # beside a BF16 weight
    "#2a": O2.states,
    "#2b": O2.states.varied(master=BF16),
    "#3": O2.states.varied(master=E4M3),
    "#4": O2.states.varied(v=E4M3),
    "O1": O1.states,
    "coat": O2.states.varied(m=COAT_E4M3, v=COAT_E5M2),
}


def parameter(shape=(24, 16), weight=FP16, seed=0, device="cpu") -> nn.Parameter:
    x = make("normal", shape, seed=seed, device=device) * 0.1
    return nn.Parameter(ScalingTensor.quantize(x, weight) if weight.scaled else x.to(weight.dtype))


def snapshot(optimizer: LowPrecisionOptimizer) -> list[torch.Tensor]:
    """Copies of the bytes of weights and states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return bytes_of(x for p in params for x in (p, *(x for _, x in sorted(optimizer.state[p].items()))))
