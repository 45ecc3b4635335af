"""Asynchronous copies of small device results, which the host reads later."""

import torch


class DeviceCopy:
    """An asynchronous copy of a small tensor to the host.

    Args:
        x: any shape and dtype; may change afterwards.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._event = None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(x.device))
        else:
            self._host = x.detach().clone()

    def values(self) -> torch.Tensor:
        """Return the copy on the CPU. It waits for the copy, but not for later work on the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def __bool__(self) -> bool:
        """Whether the copy of a 0-dim tensor is true; waits as `values` does."""
        return bool(self.values())
