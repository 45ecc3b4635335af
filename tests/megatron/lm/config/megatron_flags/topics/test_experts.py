"""The lines of mixtures of experts: a sample, told apart by their values."""

import pytest

from megatron.lm.config.megatron_flags.table import find
from megatron.lm.config.megatron_flags.topics.experts import CAPACITY, GATHERED, NOT_BUILT

SAMPLE = {
    "--num-experts 8": ("accepted", ""),
    "--moe-grouped-gemm": ("dropped", "all experts of a layer are one grouped GEMM anyway"),
    "--moe-permute-fusion": ("dropped", "fusions only change speed"),
    "--moe-token-dispatcher-type alltoall": ("dropped", GATHERED),
    "--moe-layer-recompute": ("translated", "means --recompute-granularity selective --recompute-modules mlp here"),
    "--moe-expert-capacity-factor 1.5": ("refused", CAPACITY),
    "--moe-input-jitter-eps 0.1": ("refused", NOT_BUILT),
}


@pytest.mark.parametrize("line", SAMPLE)
def test_what_is_built_is_accepted_and_the_rest_refused_by_its_reason(line: str):
    flag, *values = line.split()
    row = find(flag, values)
    assert row is not None
    assert (row.verdict.treatment, row.verdict.says) == SAMPLE[line]
