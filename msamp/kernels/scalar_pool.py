"""A pool of zeroed scalars into which kernels write: a scale_inv, or the amaxes of their results.

A kernel that quantises leaves 1 / scale, or NaN where it has met a value that is not finite: programs agree on it by an atomic maximum, so
the place has to hold 0 before. cuBLAS reads scales at multiples of 16 bytes. A zeroed tensor for each cast is an allocation and a
launch, 20 us of the host's time on an H200, where a place out of many that were zeroed together takes 3. In a CUDA graph a layer had six
such launches; without them a step of GPT-1.3B idles 0.7 ms less and takes as long (tools/bench/LOG.md).

Places are zeroed once and given once, in the order of their stream. A graph has to zero its places in every replay, so that those of a
capture come from a fill of this capture, within `captured`.
"""

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator

import torch

ALIGNED = 4  # FP32 values from one place to the next: 16 bytes
MANY = 256


class ScalarPool:
    """Hands out zeroed FP32 scalars, up to four that lie together, many of them from one launch.

    Args:
        count: of places that one fill gives.
        device: theirs.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._left: list[torch.Tensor] = []

    def take(self, size: int | None = None) -> torch.Tensor:
        """FP32 [size], 0-dim for None, holding 0, 16-byte aligned as cuBLAS wants it, and handed out once; `size` 1 to 4."""
        while True:
            try:
                place = self._left.pop()  # by itself, since forward and backward run in threads of their own
                return place if size is None else place.as_strided((size,), (1,))
            except IndexError:
                with torch.inference_mode(False):  # what evaluation leaves over has to serve training
                    zeros = torch.zeros(self._count, ALIGNED, device=self._device, dtype=torch.float32)[:, 0].unbind()
                    # Detached, so that it has a version of its own: writes beside it do not change what is kept for backward.
                    self._left = [zero.data for zero in zeros]


Key = tuple[int, int]  # a GPU, and the handle of a stream on it
_EAGER: dict[Key, ScalarPool] = {}
_CAPTURES: list[dict[Key, ScalarPool]] = []  # the one that is under way


@functools.cache
def _one_at_a_time() -> contextlib.AbstractContextManager[object]:
    return threading.RLock()


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Around a capture of a CUDA graph: the places that it asks for are zeroed by the graph itself. It begins before the capture, so that
    the capture of another thread waits."""
    with _one_at_a_time():
        _CAPTURES.append({})
        try:
            yield
        finally:
            _CAPTURES.pop()


def try_take(device: torch.device) -> torch.Tensor | None:
    """A scalar as `ScalarPool.take` gives it, on the current stream of a GPU. None where the kernel has to make its own: on a CPU, in a
    graph of torch.compile, under a dispatch mode, which may make fakes, and in a capture that is not within `captured`."""
    pool = _here(device)
    return None if pool is None else pool.take()


def take(device: torch.device, size: int | None = None) -> torch.Tensor:
    """FP32 [size], 0-dim for None, holding 0: a scalar of the pool, or where there is none (`try_take`) memory of its own.

    Raises:
        ValueError: a size that is not 1 to 4.
    """
    if size is not None and not 1 <= size <= ALIGNED:
        raise ValueError(f"a place of {size} values: give 1 to {ALIGNED}, which lie together")
    pool = _here(device)
    if pool is not None:
        return pool.take(size)
    return torch.zeros(() if size is None else size, dtype=torch.float32, device=device)


def _here(device: torch.device) -> ScalarPool | None:
    if torch.compiler.is_compiling() or device.type != "cuda" or torch._C._len_torch_dispatch_stack():
        return None
    by_stream = _EAGER
    if torch.cuda.is_current_stream_capturing():
        if not _CAPTURES:
            return None
        by_stream = _CAPTURES[-1]
    index = gpu_index(device)
    # The handle alone, as torch.compile's own code asks for it: a Stream object for each cast took 5 us.
    key = index, torch._C._cuda_getCurrentRawStream(index)
    pool = by_stream.get(key)
    if pool is None:
        pool = by_stream[key] = ScalarPool(MANY, torch.device("cuda", index))
    return pool


def gpu_index(device: torch.device) -> int:
    """Index of a GPU; without one in its name it is the current."""
    return torch.cuda.current_device() if device.index is None else device.index


def aligned(values: torch.Tensor) -> Iterable[torch.Tensor]:
    """FP32 [n] -> its n values, 0-dim, each 16-byte aligned."""
    places = values.new_empty(len(values), ALIGNED)[:, 0]
    places.copy_(values)
    return places.unbind()
