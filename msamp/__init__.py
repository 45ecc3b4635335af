"""Low-precision training for PyTorch: FP8-LM's levels O1, O2, O3, COAT and Collage in any loop.

model, optimizer = msamp.initialize(model, optimizer, recipe="O2")
"""

from msamp import amp
from msamp.comm import exchange as exchanges
from msamp.comm.grad_sync import GradSync
from msamp.integrations.capture import capture
from msamp.integrations.clipping import clip_grad_norm_
from msamp.integrations.initialize import initialize
from msamp.integrations.ms_amp import warn_of_accelerate
from msamp.integrations.precision_guard import PrecisionGuard
from msamp.integrations.saving import exact_state_dict, fp8_state_dict, plain_state_dict, save_plain
from msamp.nn import filters
from msamp.nn.convert import convert, float_copy
from msamp.nn.expert_layer import Experts
from msamp.nn.linear import FP8Linear
from msamp.nn.scaling_state import ScalingState
from msamp.nn.survey import survey
from msamp.nn.transformer_block import TransformerBlock
from msamp.nn.unfused import Activation, LayerNorm, RMSNorm
from msamp.numerics import formats, granularity, scaling
from msamp.numerics import recipe as recipes
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim import updates
from msamp.optim.collage import collage_adamw, update_quality
from msamp.optim.optimizer import FP8AdamW, LowPrecisionOptimizer
from msamp.optim.update_error import lost_updates
from msamp.parallel.data_parallel import grad_sync
from msamp.parallel.greedy_zero import ZeRO

warn_of_accelerate()

__version__ = "0.2.0"  # setup.py reads it here
__all__ = [
    "Activation", "Experts", "FP8AdamW", "FP8Linear", "GradSync", "LayerNorm", "LowPrecisionOptimizer", "PrecisionGuard", "RMSNorm",
    "ScalingState", "ScalingTensor", "TransformerBlock", "ZeRO", "amp", "capture", "clip_grad_norm_", "collage_adamw", "convert",
    "exact_state_dict", "exchanges", "filters", "float_copy", "formats", "fp8_state_dict", "fp32_values", "grad_sync", "granularity",
    "initialize", "lost_updates", "plain_state_dict", "recipes", "save_plain", "scaling", "survey", "update_quality", "updates",
]  # fmt: skip
