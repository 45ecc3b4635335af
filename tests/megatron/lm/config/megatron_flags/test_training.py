"""The lines of training: a sample, told apart by their values."""

import pytest

from megatron.lm.config.megatron_flags.training import FLAGS

BY_LINE = {row.line: row.verdict.treatment for row in FLAGS}


@pytest.mark.parametrize(("line", "treatment"), [("--optimizer adam", "dropped"), ("--optimizer TEXT", "refused"), ("--lr X", "accepted")])
def test_the_optimizer_is_adamw(line, treatment):
    assert BY_LINE[line] == treatment
