"""Masters that follow weights written from outside the optimizer.

A weight with a master beside it is cast from that master after every update. A write from outside does not reach the master:
`model.load_state_dict`, a `copy_`, a new initialisation, an average of weights that is swapped in. The next update would then bring back
the weight's former value. So before an update each weight that was written since the optimizer's own last write is compared with its
master, element by element: where the weight is still what the master casts to, the master stays; where it is not, the master takes the
weight's value. Weights that were saved with their masters pass the comparison whole, whichever of the two was loaded first.
"""

from collections.abc import Mapping

import torch

from msamp.kernels.reference.grad_stats import grad_stats
from msamp.numerics import mcf
from msamp.numerics.quantize import cast
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.numerics.tensor import PLAIN, ScalingTensor
from msamp.optim import updates
from msamp.optim.states import local, payload, scale_inv, weight_format

_CHUNK = 2**24  # elements compared at a time: half a dozen FP32 temporaries of 64 MiB
_COARSER = 256.0  # how much coarser than it could be a scale may stay: FP16 still holds every E4M3 value of a tensor exactly


def follow_states_(state: Mapping[str, torch.Tensor], weight: torch.Tensor, whole: torch.Tensor) -> None:
    """Let the master or the second component of a pair beside a weight follow a weight that was written from outside; arguments as of
    `follow_weight_`."""
    if updates.MASTER.key in state:
        follow_weight_(state[updates.MASTER.key], weight, whole)
    for key in [key for key, first in updates.remainders().items() if first == updates.WEIGHT and key in state]:
        follow_weight_in_pair_(state[key], weight)


def follow_weight_(master: torch.Tensor, weight: torch.Tensor, whole: torch.Tensor) -> None:
    """Where `weight` is no longer what `master` casts to, the master takes its value; elsewhere it keeps its own. The host does not wait.

    A finer master within one ulp of the midpoint between two codes may belong to either code: at first, weight and master are two roundings
    of the same values.

    Args:
        master: in any format, changed in place.
        weight: the same shape.
        whole: the parameter of which `weight` is rows, or `weight` itself: a new scale follows from it, so that pieces have the same.
    """
    fmt, own = weight_format(weight), weight_format(master)
    slack = 2.0**-own.mantissa_bits if own.mantissa_bits > fmt.mantissa_bits else 0.0
    last, of_weight = scale_inv(master), scale_inv(weight)
    factor = torch.ones((), device=weight.device, dtype=torch.float32) if of_weight is None else inverse(of_weight)
    scale = None if last is None else _scale(inverse(last), whole, own.max)
    stored, written = payload(master), payload(weight)
    length = weight.shape[0] if weight.dim() else 1
    rows = max(1, _CHUNK * length // max(1, weight.numel()))
    for start in range(0, length, rows):
        part = slice(start, start + rows) if weight.dim() else ...
        codes = written[part].float()
        before = stored[part].float() if last is None else stored[part].float() * last
        ends = [cast(before * (1.0 + sign * slack) * factor, fmt).float() for sign in (-1.0, 1.0)]
        same = (torch.minimum(*ends) <= codes) & (codes <= torch.maximum(*ends))
        values = torch.where(same, before, codes if of_weight is None else codes * of_weight)
        stored[part].copy_(cast(values if scale is None else values * scale, own))
    if last is not None and scale is not None:
        last.copy_(inverse(scale))


def follow_weight_in_pair_(remainder: torch.Tensor, weight: torch.Tensor) -> None:
    """Drop the second components of a row in which one is too large for its first component: the weight was written from outside.

    A second component is at most one ulp of its first, 2^-7 of it. Weights of the same size that are written by hand keep theirs, which are
    below the weight's own precision. Weights that are put back keep them whole. The host does not wait.

    Args:
        remainder: the second components, in any format of Collage's pairs, changed in place.
        weight: the same shape, BF16; a row, along dim 0, is what no process cuts.
    """
    first, second = mcf.load_pair(weight.detach(), remainder)
    fits = second.abs().float() <= first.abs().float() * 2.0**-7 + torch.finfo(torch.bfloat16).smallest_normal
    kept = fits.flatten(1).all(1).view(-1, *[1] * (weight.dim() - 1)) if weight.dim() > 1 else fits
    stored = remainder.view(torch.uint8) if remainder.element_size() == 1 else remainder
    stored.copy_(torch.where(kept, stored, torch.zeros_like(stored)))


def _scale(last: torch.Tensor, whole: torch.Tensor, largest: float) -> torch.Tensor:
    """FP32 0-dim: the scale of a master that follows `whole`. The last scale stays as long as it fits, which keeps all bits."""
    amax = grad_stats(None, [whole.detach()], squares=False)[0][0, 0]
    new = scale_from_amax(2.0 * amax, largest, last)  # twice: kept masters may exceed their weights
    return torch.where((amax * last <= largest) & (new <= _COARSER * last), last, new)


def version_of(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Numbers that change with every write of weights and states, except through `.data` of a plain tensor, which counts by itself."""
    found: list[int] = []
    for x in tensors:
        if type(x) not in PLAIN:  # by type, since a step asks ten times for every parameter
            x = local(x)
            x = x.payload if isinstance(x, ScalingTensor) else x
        found += (id(x), x._version)
    return tuple(found)
