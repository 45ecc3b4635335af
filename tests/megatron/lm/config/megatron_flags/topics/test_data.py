"""The lines of data: a sample, told apart by their values."""

import pytest

from megatron.lm.config.megatron_flags.topics.data import FLAGS

BY_LINE = {row.line: row.verdict.treatment for row in FLAGS}


@pytest.mark.parametrize(
    ("line", "treatment"), [("--split TEXT", "accepted"), ("--sample-rate 1", "dropped"), ("--sample-rate X", "refused")]
)
def test_all_data_is_used(line, treatment):
    assert BY_LINE[line] == treatment
