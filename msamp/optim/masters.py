"""Keep master weights consistent with weights that something other than the optimizer wrote.

A weight with a separate master is cast from that master after every update. Other writes do not reach the master: `model.load_state_dict`,
a `copy_`, a new initialization, averaged weights that are swapped in. The next update would then restore the weight's former value. So
before an update, the optimizer compares each weight that was written since its own last write with the master, element by element. If the
weight still equals the cast master, the master element stays; otherwise it takes the weight's value. Weights that were saved with their
masters compare equal, so either can be loaded first.
"""

from collections.abc import Mapping

import torch

from msamp.kernels.reference.grad_stats import grad_stats
from msamp.numerics import mcf
from msamp.numerics.formats import Format
from msamp.numerics.lost_writes import warn_if_bits_are_lost
from msamp.numerics.quantize import cast
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.numerics.tensor import PLAIN, ScalingTensor
from msamp.optim import updates
from msamp.optim.states import local, payload, scale_inv, weight_format

_CHUNK = 2**24  # elements compared at a time, with about six FP32 temporaries of 64 MiB
_COARSER = 256.0  # a scale is kept if it is at most this much too coarse: FP16 then still represents every E4M3 value of a tensor exactly


def follow_states_(state: Mapping[str, torch.Tensor], weight: torch.Tensor, whole: torch.Tensor) -> None:
    """Update the master, or the second component of a pair, after a write to its weight; arguments as in `follow_weight_`."""
    if updates.MASTER.key in state:
        follow_weight_(state[updates.MASTER.key], weight, whole)
    for key in [key for key, first in updates.remainders().items() if first == updates.WEIGHT and key in state]:
        follow_weight_in_pair_(state[key], weight)


def follow_weight_(master: torch.Tensor, weight: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy the elements of `weight` that no longer equal the cast `master` to the master, with a warning if the weight is FP8.

    A master within one ulp, its own or of the weight's dtype, of the midpoint between two codes matches either code: at first weight and
    master are separate roundings of the same values, and plain weights are saved from the masters in that dtype.

    Args:
        master: in any format, changed in place.
        weight: of the same shape.
        whole: the parameter that contains the rows `weight`, or `weight` itself. A new scale follows from it, so all pieces get the same.
    """
    fmt, own = weight_format(weight), weight_format(master)
    last, of_weight = scale_inv(master), scale_inv(weight)
    factor = torch.ones((), device=weight.device, dtype=torch.float32) if of_weight is None else inverse(of_weight)
    scale = None
    if last is not None:  # which is kept while it fits, so no bits change
        current = inverse(last)
        amax = grad_stats(None, [whole.detach()], squares=False)[0][0, 0]
        new = scale_from_amax(2.0 * amax, own.max, current)  # twice: masters that are kept may exceed their weights
        scale = torch.where((amax * current <= own.max) & (new <= _COARSER * current), current, new)
    stored, written = payload(master), payload(weight)
    length = weight.shape[0] if weight.dim() else 1
    rows = max(1, _CHUNK * length // max(1, weight.numel()))
    for start in range(0, length, rows):
        part = slice(start, start + rows) if weight.dim() else ...
        codes = written[part].float()
        before = stored[part].float() if last is None else stored[part].float() * last
        same = _same(before, codes, factor, fmt, own, weight.dtype)
        if fmt.bytes == 1 < own.bytes:
            warn_if_bits_are_lost(~same.all())
        values = torch.where(same, before, codes if of_weight is None else codes * of_weight)
        stored[part].copy_(cast(values if scale is None else values * scale, own))
    if last is not None and scale is not None:
        last.copy_(inverse(scale))


def belongs(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return whether every element of `weight` is what `master` casts to, as `follow_weight_` compares them: bool 0-dim."""
    of_weight, last = scale_inv(weight), scale_inv(master)
    factor = torch.ones((), device=weight.device, dtype=torch.float32) if of_weight is None else inverse(of_weight)
    before = payload(master).float() if last is None else payload(master).float() * last
    return _same(before, payload(weight).float(), factor, weight_format(weight), weight_format(master), weight.dtype).all()


def _same(before: torch.Tensor, codes: torch.Tensor, factor: torch.Tensor, fmt: Format, own: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask: True where the stored weight of outer `dtype` equals a fresh cast of its master's values `before`."""
    slack = max((ulp for ulp in (torch.finfo(own.dtype).eps, torch.finfo(dtype).eps) if ulp < torch.finfo(fmt.dtype).eps), default=0.0)
    ends = [cast(before * (1.0 + sign * slack) * factor, fmt).float() for sign in (-1.0, 1.0)]
    return (torch.minimum(*ends) <= codes) & (codes <= torch.maximum(*ends))


def follow_weight_in_pair_(remainder: torch.Tensor, weight: torch.Tensor) -> None:
    """Zero the second components of each row in which one is too large for its first component, since something else wrote that weight.

    A second component is at most one ulp of its first, 2^-7 of it. New weights of similar magnitude keep the old second components, which
    are below the weight's own precision. Restored weights keep theirs exactly. The host does not wait.

    Args:
        remainder: the second components, in any format of Collage's pairs, changed in place.
        weight: of the same shape, BF16. Rows are along dim 0; no process has part of a row.
    """
    first, second = mcf.load_pair(weight.detach(), remainder)
    fits = second.abs().float() <= first.abs().float() * 2.0**-7 + torch.finfo(torch.bfloat16).smallest_normal
    kept = fits.flatten(1).all(1).view(-1, *[1] * (weight.dim() - 1)) if weight.dim() > 1 else fits
    stored = remainder.view(torch.uint8) if remainder.element_size() == 1 else remainder
    stored.copy_(torch.where(kept, stored, torch.zeros_like(stored)))


def version_of(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return numbers that change with every write, except in place through `.data` of a plain tensor, which has its own counter."""
    versions: list[int] = []
    for x in tensors:
        if type(x) is ScalingTensor:  # comparisons of types are faster, and a step makes ten per parameter
            x = x.payload
        elif type(x) not in PLAIN:
            x = local(x)
            x = x.payload if isinstance(x, ScalingTensor) else x
        versions += (id(x), x._version, x.data_ptr())
    return tuple(versions)
