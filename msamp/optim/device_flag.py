"""A yes or no that the device has found, for a host that does not want to wait for it."""

import torch


class DeviceFlag:
    """A copy of a bool on its way to the host; `bool()` waits until it is there, and for nothing that the device does after it.

    Args:
        flag: bool 0-dim; may change afterwards.
    """

    def __init__(self, flag: torch.Tensor) -> None:
        self._event = None
        if flag.is_cuda:
            self._host = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._host.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(flag.device))
        else:
            self._host = flag.clone()

    def __bool__(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._host)
