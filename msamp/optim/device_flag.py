"""Results of the device that the host reads later, without waiting for it now."""

import torch


class DeviceCopy:
    """A small tensor on its way to the host.

    Args:
        x: any shape and dtype; may change afterwards.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._event = None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(x.device))
        else:
            self._host = x.detach().clone()

    def values(self) -> torch.Tensor:
        """The copy, on the CPU; waits until it is there, and for nothing that the device does after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class DeviceFlag(DeviceCopy):
    """A bool on its way to the host; `bool()` waits as `values` does.

    Args:
        x: bool 0-dim; may change afterwards.
    """

    def __bool__(self) -> bool:
        return bool(self.values())
