"""Low-precision training for PyTorch: FP8-LM's levels O1, O2, O3 in any loop.

model, optimizer = msamp.initialize(model, optimizer, opt_level="O2")
"""

from msamp import amp
from msamp.comm.grad_sync import GradSync
from msamp.integrations.initialize import initialize
from msamp.nn.convert import convert
from msamp.nn.linear import FP8Linear
from msamp.numerics import formats
from msamp.numerics import recipe as recipes
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.adamw import FP8AdamW
from msamp.optim.clip import clip_grad_norm_
from msamp.optim.collage import CollageAdamW
from msamp.parallel.data_parallel import grad_sync
from msamp.parallel.greedy_zero import GreedyZeRO, ZeRO

__all__ = [
    "CollageAdamW",
    "FP8AdamW",
    "FP8Linear",
    "GradSync",
    "GreedyZeRO",
    "ScalingTensor",
    "ZeRO",
    "amp",
    "clip_grad_norm_",
    "convert",
    "grad_sync",
    "initialize",
    "recipes",
]
