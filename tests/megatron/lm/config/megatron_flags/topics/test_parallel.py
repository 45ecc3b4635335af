"""The lines of parallel: a sample, told apart by their values."""

import pytest

from megatron.lm.config.megatron_flags.topics.parallel import FLAGS

BY_LINE = {row.line: row.verdict.treatment for row in FLAGS}


@pytest.mark.parametrize(("line", "treatment"), [("--context-parallel-size 1", "dropped"), ("--context-parallel-size N", "refused")])
def test_an_axis_of_one_process_is_none(line, treatment):
    assert BY_LINE[line] == treatment
