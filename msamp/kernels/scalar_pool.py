"""A pool of zeroed scalars that kernels write to: a scale_inv, or the amaxes of their results.

A kernel that casts returns 1 / scale, or NaN after a non-finite value. Its programs combine this by an atomic maximum, so the scalar must
contain 0 before. cuBLAS requires scales to be aligned to 16 bytes. A new zeroed tensor per cast is an allocation and a launch, which costs
the host far more than handing out one of many scalars that were zeroed together. In a CUDA graph a layer had six such launches
(`tools/bench/LOG.md` has the times).

Each scalar is zeroed once and handed out once, in stream order. A CUDA graph must zero its scalars in every replay, so a capture gets
scalars that a launch inside this capture zeroes, see `captured`.
"""

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator

import torch

ALIGNED = 4  # FP32 values between two scalars: 16 bytes
MANY = 256


class ScalarPool:
    """Hands out zeroed FP32 scalars, up to four contiguous ones at a time; one launch zeroes `count` of them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._left: list[torch.Tensor] = []

    def take(self, size: int | None = None) -> torch.Tensor:
        """Return zeros that are handed out once: FP32 [size], 0-dim for None, aligned to 16 bytes for cuBLAS; `size` is 1 to 4."""
        while True:
            try:
                place = self._left.pop()  # atomic, since forward and backward run in different threads
                return place if size is None else place.as_strided((size,), (1,))
            except IndexError:
                with torch.inference_mode(False):  # training must be able to use what evaluation leaves over
                    zeros = torch.zeros(self._count, ALIGNED, device=self._device, dtype=torch.float32)[:, 0].unbind()
                    # Detached to get its own version counter: writes to neighbors must not invalidate tensors saved for backward.
                    self._left = [zero.data for zero in zeros]


Key = tuple[int, int]  # a GPU, and the handle of a stream on it
_EAGER: dict[Key, ScalarPool] = {}
_CAPTURES: list[dict[Key, ScalarPool]] = []  # at most one: the current capture
_MODES: list[int] = []  # the number of dispatch modes that only watch the current capture


@functools.cache
def _one_at_a_time() -> contextlib.AbstractContextManager[object]:
    return threading.RLock()


@contextlib.contextmanager
def captured(modes: int = 0) -> Iterator[None]:
    """Context around the capture of a CUDA graph, in which the graph itself zeroes its scalars. Enter it before the capture, so that
    captures of other threads wait. `modes`: how many dispatch modes will only watch the capture."""
    with _one_at_a_time():
        _CAPTURES.append({})
        _MODES.append(modes)
        try:
            yield
        finally:
            _CAPTURES.pop()
            _MODES.pop()


def try_take(device: torch.device) -> torch.Tensor | None:
    """Return a scalar of `ScalarPool.take` on a GPU's current stream. Return None if the kernel must allocate its own: on a CPU, under
    torch.compile, under a dispatch mode, which may create fake tensors, and in a capture outside `captured`."""
    pool = _here(device)
    return None if pool is None else pool.take()


def take(device: torch.device, size: int | None = None) -> torch.Tensor:
    """Return zeros, FP32 [size] with a size of 1 to 4, 0-dim for None, from the pool, or newly allocated if `try_take` returns None."""
    pool = _here(device)
    if pool is not None:
        return pool.take(size)
    return torch.zeros(() if size is None else size, dtype=torch.float32, device=device)


def _here(device: torch.device) -> ScalarPool | None:
    if torch.compiler.is_compiling() or device.type != "cuda" or torch._C._len_torch_dispatch_stack() > sum(_MODES):
        return None
    by_stream = _EAGER
    if torch.cuda.is_current_stream_capturing():
        if not _CAPTURES:
            return None
        by_stream = _CAPTURES[-1]
    index = gpu_index(device)
    # Only the handle, as in torch.compile's own code: a Stream object per cast took 5 us.
    key = index, torch._C._cuda_getCurrentRawStream(index)
    pool = by_stream.get(key)
    if pool is None:
        pool = by_stream[key] = ScalarPool(MANY, torch.device("cuda", index))
    return pool


def gpu_index(device: torch.device) -> int:
    """Return the index of a GPU; the current one if `device` has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def aligned(values: torch.Tensor) -> Iterable[torch.Tensor]:
    """Split FP32 [n] into n 0-dim tensors, each aligned to 16 bytes."""
    places = values.new_empty(len(values), ALIGNED)[:, 0]
    places.copy_(values)
    return places.unbind()
