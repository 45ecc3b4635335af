"""Where a parameter's master weight is: the parameter itself, or a copy beside it in the optimizer's state."""

import torch

from msamp.numerics.formats import PLAIN_FP16, Format, of_dtype
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.state_fp8 import state_format


def weight_format(p: torch.Tensor) -> Format:
    """The format in which a parameter is stored."""
    if isinstance(p, ScalingTensor):
        return p.format
    return PLAIN_FP16 if p.dtype == torch.float16 else of_dtype(p.dtype)


def is_own_master(p: torch.Tensor, master: Format) -> bool:
    """True where the parameter is stored in the master's format: no second copy is kept (O1 and O2: FP16 scaled)."""
    return weight_format(p) == master


def make_master(p: torch.Tensor, master: Format, values: torch.Tensor | None = None) -> torch.Tensor:
    """A master copy of `p`.

    Args:
        p: the parameter.
        master: the copy's format.
        values: what the parameter was before it was rounded to its own format (any float dtype); its values by default.
    """
    values = fp32_values(p if values is None else values).to(p.device)
    if master.scaled:
        return ScalingTensor.quantize(values, master)
    copy = state_format(master).init(p)
    copy.copy_(values)
    return copy
