"""How many sequences each iteration of a run reads: a constant number, or that of `--rampup-batch-size START INCREMENT SAMPLES`.

While a run ramps up, its batch grows from START to `--global-batch-size` in steps of INCREMENT, spread evenly over the first SAMPLES
sequences. The definition is Megatron-LM's (`megatron.core.num_microbatches_calculator`), which is not imported here because flags are
checked without torch. The size of an iteration depends on the samples consumed before it and on nothing else, so that a resumed run
continues in mid-ramp.
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
    """Sequences of each iteration; `final`: after the ramp, or in all iterations of a run without one."""

    final: int
    ramp: Ramp | None = None

    def at(self, consumed_samples: int) -> int:
        """Sequences of the iteration that begins after `consumed_samples`."""
        ramp = self.ramp
        if ramp is None or consumed_samples > ramp.samples:
            return self.final
        samples_per_step = ramp.samples / ((self.final - ramp.start) // ramp.increment)
        return ramp.start + int(consumed_samples / samples_per_step) * ramp.increment

    def consumed(self, iterations: int) -> int:
        """Sequences of the first `iterations` iterations together."""
        starts = _starts(self)
        start = starts[bisect.bisect_right(starts, iterations, key=lambda start: start.iteration) - 1]
        return start.consumed + (iterations - start.iteration) * start.size

    def iterations(self, samples: int) -> int:
        """Iterations of a run of `samples` sequences, as Megatron-LM counts them: a last batch that is not full is left out, but for a
        run that ends in the ramp."""
        starts = _starts(self)
        place = bisect.bisect_right(starts, samples, key=lambda start: start.consumed) - 1
        start = starts[place]
        return start.iteration + (samples - start.consumed) // start.size + (place < len(starts) - 1)


class _Start(NamedTuple):
    """The first of several iterations of one size: its number from 0, the sequences read before it, and the size."""

    iteration: int
    consumed: int
    size: int


@functools.lru_cache(maxsize=8)
def _starts(sizes: BatchSizes) -> list[_Start]:
    """Where each batch size of a run begins; the last entry is the final size, which has no end."""
    iteration = consumed = 0
    starts = []
    while (size := sizes.at(consumed)) != sizes.final or (sizes.ramp is not None and consumed <= sizes.ramp.samples):
        starts.append(_Start(iteration, consumed, size))
        count = _iterations_of_a_size(sizes, consumed, size)
        iteration, consumed = iteration + count, consumed + count * size
    return [*starts, _Start(iteration, consumed, size)]


def _iterations_of_a_size(sizes: BatchSizes, consumed: int, size: int) -> int:
    """Iterations from `consumed` sequences on, of which the first has `size`, until one has another size or begins after the ramp."""
    assert sizes.ramp is not None
    last = sizes.ramp.samples

    def ends(count: int) -> bool:
        after = consumed + count * size
        return after > last or sizes.at(after) != size

    return bisect.bisect_left(range((last - consumed) // size + 2), True, lo=1, key=ends)
