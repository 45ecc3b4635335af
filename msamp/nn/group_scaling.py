"""Group Scaling [COAT, part 2]: a just-in-time cast that does not read its tensor for the amax, since the tensor's producer took it.

A just-in-time cast wants the amax of the whole tensor before its first code: it reads 2 bytes an element, reads them again and writes two
layouts, 6 bytes. The kernel that wrote the tensor had every value in its registers. It leaves the maxima of the parts that its programs
held, and the cast folds these few hundred numbers: 4 bytes an element, and the same scale, since a maximum does not depend on the parts
that it is taken over (`msamp.numerics.range_expand.two_stage_amax`).

In the fused blocks two tensors of a layer are written by one kernel and cast by another: the gradient that the MLP half's norm writes
and the projection casts, and the one that the attention half's norm writes and FC2 of the layer before casts. Writer and caster are two
autograd functions, and between those autograd carries a tensor and nothing else. So the maxima lie on the tensor, with the memory and the
version that it had: any other tensor, such as a sum of two gradients, a copy or a gradient received from another rank, has none, or another
version or memory, and is read as ever. A write that hides from the version counter (`.data`) hides from this too, as it does from autograd.
"""

import torch

from msamp.nn.cast_scales import CastScales

_LEFT = "_group_scaling_maxima"


def leave_maxima(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """`x` with the maxima that its kernel found.

    Args:
        x: what the kernel wrote.
        maxima: FP32, largest magnitudes of its parts, together all of it; empty where the kernel was not asked: nothing is left.
    """
    if maxima.numel():
        setattr(x, _LEFT, (maxima, _state(x)))
    return x


def maxima_for(slot: CastScales, x: torch.Tensor) -> torch.Tensor | None:
    """The maxima of `x` for a cast by the slot; None where the scale is known beforehand, and where `x` has none that are its own."""
    maxima, state = getattr(x, _LEFT, (None, None))
    return maxima if maxima is not None and slot.scale is None and state == _state(x) else None


def _state(x: torch.Tensor) -> tuple[int, int]:
    """Memory and version: a copy, which takes the attribute with it, has memory of its own."""
    return x.data_ptr(), x._version
