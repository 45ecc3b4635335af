"""Batch sizes of a run against megatron-core's calculator, and the lengths that follow from them."""

import pytest
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from megatron.lm.config.sections.batch_sizes import BatchSizes, Ramp

RAMPS = [Ramp(2, 2, 100), Ramp(8, 4, 33), Ramp(2, 7, 1), Ramp(4, 1, 1000)]


@pytest.mark.parametrize("ramp", RAMPS)
def test_each_iteration_has_the_size_of_megatron_core_s_calculator(ramp: Ramp):
    final = ramp.start + 6 * ramp.increment
    sizes = BatchSizes(final, ramp)
    calculator = RampupBatchsizeNumMicroBatchesCalculator(final, 1, 1, False, 1, ramp.start, ramp.increment, ramp.samples)
    consumed = 0
    for iteration in range(300):
        calculator.update(consumed, consistency_check=True)
        assert sizes.consumed(iteration) == consumed
        assert sizes.at(consumed) == calculator.get_current_global_batch_size()
        consumed += sizes.at(consumed)
    assert sizes.at(consumed) == final


@pytest.mark.parametrize("ramp", [None, *RAMPS])
def test_iterations_of_a_number_of_samples_are_megatron_lm_s(ramp: Ramp | None):
    """Megatron-LM steps through the ramp while neither it nor the samples are over, and leaves out a last batch that is not full."""
    sizes = BatchSizes(26 if ramp is None else ramp.start + 6 * ramp.increment, ramp)
    for samples in range(1, 2500, 13):
        consumed, iterations = 0, 0
        while ramp is not None and consumed <= ramp.samples and consumed <= samples:
            consumed += sizes.at(consumed)
            iterations += 1
        iterations += max(0, samples - consumed) // sizes.final
        assert sizes.iterations(samples) == iterations


def test_a_ramp_of_a_trillion_samples_is_counted_at_once():
    sizes = BatchSizes(4, Ramp(1, 1, 10**12))
    assert (sizes.consumed(10**9), sizes.iterations(10**9)) == (10**9, 10**9 + 1)
    assert sizes.at(sizes.consumed(sizes.iterations(10**13))) == 4
