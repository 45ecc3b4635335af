"""Places in memory where kernels leave a scale_inv.

A kernel that quantises leaves 1 / scale, or NaN where it has met a value that is not finite: programs agree on it by an atomic maximum, so
the place has to hold 0 before. cuBLAS reads scales at multiples of 16 bytes. A zeroed tensor for each cast is an allocation and a
launch, 20 us of the host's time on an H200, where a place out of many that were zeroed together takes 3.
"""

from collections.abc import Iterable

import torch

ALIGNED = 4  # FP32 values from one place to the next: 16 bytes
MANY = 256


class ScaleInvs:
    """Hands out zeroed FP32 scalars, allocated together to save launches, for the scale_inv of the tensors that kernels quantise.

    Args:
        count: of zeros that one fill gives.
        device: theirs.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._left: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """FP32 0-dim, holding 0, 16-byte aligned as cuBLAS wants it, and handed out once."""
        while True:
            try:
                return self._left.pop()  # by itself, since forward and backward run in threads of their own
            except IndexError:
                with torch.inference_mode(False):  # what evaluation leaves over has to serve training
                    zeros = torch.zeros(self._count, ALIGNED, device=self._device)[:, 0].unbind()
                    # Detached, so that it has a version of its own: writes beside it do not change what is kept for backward.
                    self._left = [zero.data for zero in zeros]


_EAGER: dict[tuple[torch.device, int], ScaleInvs] = {}


def eager_place(device: torch.device) -> torch.Tensor | None:
    """A place as `ScaleInvs.take` gives it, on the current stream of a GPU; None on a CPU and in a graph, torch.compile's or a CUDA graph,
    which has to zero its places in every replay. `device` is a tensor's: a GPU's has its index."""
    if torch.compiler.is_compiling() or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    # The handle alone, as torch.compile's own code asks for it: a Stream object for each cast took 5 us.
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    places = _EAGER.get(key)
    if places is None:
        places = _EAGER[key] = ScaleInvs(MANY, device)
    return places.take()


def aligned(values: torch.Tensor) -> Iterable[torch.Tensor]:
    """FP32 [n] -> its n values, 0-dim, each 16-byte aligned."""
    places = values.new_empty(len(values), ALIGNED)[:, 0]
    places.copy_(values)
    return places.unbind()
