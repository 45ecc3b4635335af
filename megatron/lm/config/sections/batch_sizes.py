"""Batch size of each iteration: constant, or with a ramp (`--rampup-batch-size START INCREMENT SAMPLES`).

During the ramp, the batch grows from START to `--global-batch-size` in steps of INCREMENT, spread evenly over the first SAMPLES sequences.
The definition is Megatron-LM's (`megatron.core.num_microbatches_calculator`), which is not imported here because flags are checked without
torch. The size of an iteration depends only on the samples consumed before it, so that a resumed run continues within the ramp.
"""

import bisect
import functools
from dataclasses import dataclass
from typing import NamedTuple

MOST_SIZES = 100_000  # batch sizes of a ramp: more take seconds to list


@dataclass(frozen=True)
class Ramp:
    """Growth of the batch: `start` sequences, `increment` more at each step, over the first `samples` sequences of the run."""

    start: int
    increment: int
    samples: int


@dataclass(frozen=True)
class BatchSizes:
    """Batch size of each iteration; `final`: after the ramp, or in all iterations without a ramp."""

    final: int
    ramp: Ramp | None = None

    def at(self, consumed_samples: int) -> int:
        """Return the batch size of the iteration after `consumed_samples`."""
        ramp = self.ramp
        if ramp is None or consumed_samples > ramp.samples:
            return self.final
        samples_per_step = ramp.samples / ((self.final - ramp.start) // ramp.increment)
        return ramp.start + int(consumed_samples / samples_per_step) * ramp.increment

    def consumed(self, iterations: int) -> int:
        """Return the total number of sequences in the first `iterations` iterations."""
        starts = _starts(self)
        start = starts[bisect.bisect_right(starts, iterations, key=lambda start: start.iteration) - 1]
        return start.consumed + (iterations - start.iteration) * start.size

    def iterations(self, samples: int) -> int:
        """Return the iterations of a run of `samples` sequences, as Megatron-LM counts them: an incomplete last batch is dropped, except if
        the run ends within the ramp."""
        starts = _starts(self)
        place = bisect.bisect_right(starts, samples, key=lambda start: start.consumed) - 1
        start = starts[place]
        return start.iteration + (samples - start.consumed) // start.size + (place < len(starts) - 1)


class _Start(NamedTuple):
    """First iteration with a batch size: its number from 0, the sequences read before it, and the size."""

    iteration: int
    consumed: int
    size: int


@functools.lru_cache(maxsize=8)
def _starts(sizes: BatchSizes) -> list[_Start]:
    """Return where each batch size of a run begins; the last entry is the final size, which has no end."""
    iteration = consumed = 0
    starts = []
    while (size := sizes.at(consumed)) != sizes.final or (sizes.ramp is not None and consumed <= sizes.ramp.samples):
        starts.append(_Start(iteration, consumed, size))
        count = _iterations_of_a_size(sizes, consumed, size)
        iteration, consumed = iteration + count, consumed + count * size
    return [*starts, _Start(iteration, consumed, size)]


def _iterations_of_a_size(sizes: BatchSizes, consumed: int, size: int) -> int:
    """Count the iterations of `size` from `consumed` sequences on, until one has another size or begins after the ramp."""
    assert sizes.ramp is not None
    last = sizes.ramp.samples

    def ends(count: int) -> bool:
        after = consumed + count * size
        return after > last or sizes.at(after) != size

    return bisect.bisect_left(range((last - consumed) // size + 2), True, lo=1, key=ends)
