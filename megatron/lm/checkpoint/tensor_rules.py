"""Rules for the values of a checkpoint's tensors, which a save and a load share. A problem is a text that continues after a tensor's key.

A load refuses a tensor that breaks a rule. A save of one is marked unhealthy, so that `--keep-last` never deletes a loadable checkpoint for
it. A save judges gigabytes on the device, and must not become much slower. So a large tensor is read once, for its smallest and largest
value (`extents`), and counted only if these break a rule.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.lm.checkpoint.content import group_keys, scale_key
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.training.state import Training
from msamp.numerics.formats import FP32
from msamp.numerics.scaling import MAX_EXPONENT
from msamp.optim.updates import formats_of, update_of

# The square of a larger value overflows FP32, and with it the norm of such weights and the second moment of such gradients. A second moment
# may not be larger either: the run would have had gradients of 2^32.
LARGEST = 2.0**64
_BLOCK = 2**24  # elements to convert to FP32 at a time
_NO_PAYLOADS = ("rng/", "step/", "mu/")


def extents(x: Tensor) -> Tensor:
    """Return the smallest and the largest value of `x` and 0, FP32 [2] on its device; NaN if a value is NaN. Does not wait for the device.

    Args:
        x: of a floating-point dtype, any shape.
    """
    if not x.numel():
        return torch.zeros(2, device=x.device)
    if x.element_size() == 1:  # no reductions of FP8 in torch, but its codes are ordered by magnitude, with NaN last
        x = x.reshape(-1)
        negative = x.view(torch.uint8).amax()
        range_ = torch.stack([negative.where(negative >= 128, 0), x.view(torch.int8).amax().clamp(min=0).view(torch.uint8)]).view(x.dtype)
    else:
        range_ = torch.stack(torch.aminmax(x.detach()))
    low, high = range_.float().unbind()
    return torch.stack([low.clamp(max=0), high.clamp(min=0)])


def tensor_problem(
    x: Tensor, extent: Sequence[float], scales: Sequence[float] = (), groups: Sequence[Sequence[float]] = (), *, non_negative: bool = False
) -> str | None:
    """Return what is wrong with a tensor: a value that is not finite, larger than `LARGEST`, or negative where that is impossible; a scale
    that is not a power of two, or out of range; a group with an invalid maximum or exponent. None: nothing.

    Args:
        x: the payload, of any format.
        extent: its `extents`.
        scales: its `scale_inv`; empty for a plain tensor.
        groups: in COAT's formats the `extents` of the groups' maxima, and the smallest and the largest exponent.
        non_negative: whether it must not contain negative values.
    """
    low, high = extent
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = sum(int((~block.float().isfinite()).sum()) for block in x.reshape(-1).split(_BLOCK))
        return f" has {bad} values that are NaN or infinite"
    for name, values, least, most in zip(("maximum", "exponent"), groups, (0.0, FP32.tiny), (LARGEST, FP32.max), strict=False):
        wrong = [value for value in values if not least <= value <= most]
        if wrong:
            return f" has groups with a maximum or exponent out of range: {name} {wrong[0]:g}"
    for scale in scales:
        if not 2.0**-MAX_EXPONENT <= scale <= 2.0**MAX_EXPONENT or math.frexp(scale)[0] != 0.5:
            return f" has scale_inv {scale:g}, which is not a power of two in [2^-{MAX_EXPONENT}, 2^{MAX_EXPONENT}]"
    largest, scale = max(-low, high), max(scales, default=1.0)
    if largest * scale > LARGEST:
        return f" has the value {(high if high == largest else low) * scale:g}; no run can use values above 2^64"
    if non_negative and low < 0:
        below = sum(int((block.float() < 0).sum()) for block in x.reshape(-1).split(_BLOCK))
        return f", a mean of squares, has {below} negative values, such as {low * scale:g}"
    return None


def number_problem(value: float, low: float, high: float, dtype: torch.dtype, *, whole: bool = False) -> str | None:
    """Return what is wrong with a number that must be in [low, high], and an integer if `whole`; `dtype`: how it is stored."""
    if low <= value <= high and not (whole and value != math.floor(value)):
        return None
    return f" is {value}; it must be one {dtype} in [{low}, {high}]{' without a fraction' if whole else ''}"


def problems(training: Training, items: Sequence[Item]) -> list[str]:
    """Return which of all ranks' `items` (`content.items`) that are about to be saved break a rule, and how. Collective."""
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, list(_own_problems(training, items)))
    return list(dict.fromkeys(problem for problems in everywhere for problem in problems))


def _own_problems(training: Training, items: Sequence[Item]) -> Iterator[str]:
    """Yield the problems of weights and states, with their scales and groups."""
    beside = {item.key: item.tensor for item in items if "@" in item.key}
    kinds = (kind for group in training.optimizer.param_groups for kind in formats_of(group))
    squares = {state.key for kind in kinds for state in update_of(kind).states if state.non_negative}
    judged = [item for item in items if not item.key.startswith(_NO_PAYLOADS) and "@" not in item.key and ".scaling." not in item.key]
    judged = [item for item in judged if item.tensor.is_floating_point()]
    scales = [beside.get(scale_key(item.key, item.offset)) for item in judged]
    groups = [tuple(beside.get(key) for key in group_keys(item.key, item.offset)) for item in judged]
    ranges = _on_host(extents(item.tensor) for item in judged)
    numbers = iter(_on_host(x.reshape(1) for x in scales if x is not None))
    maxima = iter(_on_host(extents(largest) for largest, _ in groups if largest is not None))
    exponents = iter(_on_host(torch.stack(torch.aminmax(k)) for _, k in groups if k is not None))
    for item, extent, scale, (largest, _) in zip(judged, ranges, scales, groups, strict=True):
        own_scales = next(numbers) if scale is not None else []
        own_groups = (next(maxima), next(exponents)) if largest is not None else ()
        non_negative = item.key.partition("/")[0] in squares
        problem = tensor_problem(item.tensor, extent, own_scales, own_groups, non_negative=non_negative)
        if problem is not None:
            yield f"{item.key}{problem}"


def _on_host(tensors: Iterable[Tensor]) -> list[list[float]]:
    """Return the values of small tensors of one length, waiting once for each device."""
    held, alike = list(tensors), defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
    for number, x in enumerate(held):
        alike[x.device, x.dtype].append(number)
    values: list[list[float]] = [[]] * len(held)
    for numbers in alike.values():
        for number, row in zip(numbers, torch.stack([held[number] for number in numbers]).tolist(), strict=True):
            values[number] = row
    return values
