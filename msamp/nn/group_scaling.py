"""Group Scaling [COAT, part 2]: just-in-time casts that get the amax from the kernel that wrote the tensor, without reading it again.

A just-in-time cast requires the amax of the whole tensor before its first code: it reads 2 bytes per element, reads them again and writes
two layouts, 6 bytes in total. But the kernel that wrote the tensor had every value in registers. So that kernel returns the maximum of each
of its programs, and the cast only reduces these few hundred numbers. This takes 4 bytes per element and gives the same scale, since a
maximum does not depend on the order of reduction.

In the fused blocks, one kernel writes and another casts two gradients per layer: the norm of the MLP half writes one that the projection
casts, and the norm of the attention half writes one that the previous layer's FC2 casts. The two kernels run in different autograd
functions, and autograd passes only the tensor between them. So the maxima are an attribute of the tensor, together with its memory address
and version. Any other tensor, such as a sum of two gradients, a copy or a gradient received from another rank, has no maxima or fails the
comparison, and the cast reads it as usual. A write that bypasses the version counter (`.data`) goes unnoticed here, as it does in autograd.
"""

import torch

from msamp.nn.cast_scales import CastScales

_LEFT = "_group_scaling_maxima"


def leave_maxima(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Attach to `x` the maxima that its kernel measured, and return it.

    Args:
        x: the kernel's output.
        maxima: FP32, the largest magnitude of each part of `x`; empty if the kernel did not measure them: nothing is attached.
    """
    if maxima.numel():
        setattr(x, _LEFT, (maxima, _state(x)))
    return x


def maxima_for(slot: CastScales, x: torch.Tensor) -> torch.Tensor | None:
    """Return the maxima of `x` for a cast with this slot; None if the slot has a scale, or `x` has no valid maxima."""
    maxima, state = getattr(x, _LEFT, (None, None))
    return maxima if maxima is not None and slot.scale is None and state == _state(x) else None


def _state(x: torch.Tensor) -> tuple[int, int]:
    """Return memory address and version: a copy keeps the attribute but has another address."""
    return x.data_ptr(), x._version
