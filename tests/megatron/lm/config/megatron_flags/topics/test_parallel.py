"""The lines of parallel: a sample, told apart by their values."""

import pytest

from megatron.lm.config.megatron_flags.topics.parallel import FLAGS

BY_LINE = {row.line: row.verdict.treatment for row in FLAGS}


@pytest.mark.parametrize(
    ("line", "treatment"),
    [
        ("--expert-model-parallel-size 1", "dropped"),
        ("--expert-model-parallel-size N", "refused"),
        ("--context-parallel-size N", "accepted"),
        ("--cp-comm-type TEXT", "accepted"),
        ("--hybrid-context-parallel", "refused"),
    ],
)
def test_an_axis_is_accepted_or_of_one_process(line, treatment):
    assert BY_LINE[line] == treatment
