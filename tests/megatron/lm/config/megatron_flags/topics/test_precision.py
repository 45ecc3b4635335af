"""The lines of precision: a sample, told apart by their values."""

import pytest

from megatron.lm.config.megatron_flags.topics.precision import FLAGS

BY_LINE = {row.line: row.verdict.treatment for row in FLAGS}


@pytest.mark.parametrize(("line", "treatment"), [("--bf16", "accepted"), ("--exp-avg-dtype fp32", "dropped"), ("--fp4-*", "refused")])
def test_formats_are_chosen_by_the_precision(line, treatment):
    assert BY_LINE[line] == treatment
