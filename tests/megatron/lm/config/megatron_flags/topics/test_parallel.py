"""The lines of parallel: a sample, told apart by their values."""

import pytest

from megatron.lm.config.megatron_flags.topics.parallel import FLAGS

BY_LINE = {row.line: row.verdict.treatment for row in FLAGS}


@pytest.mark.parametrize(
    ("line", "treatment"),
    [
        ("--expert-model-parallel-size N", "accepted"),
        ("--context-parallel-size N", "accepted"),
        ("--cp-comm-type TEXT", "accepted"),
        ("--hybrid-context-parallel", "refused"),
    ],
)
def test_an_axis_is_accepted_and_its_variants_refused(line, treatment):
    assert BY_LINE[line] == treatment
