"""The lines of outputs: a sample, told apart by their values."""

import pytest

from megatron.lm.config.megatron_flags.topics.outputs import FLAGS

BY_LINE = {row.line: row.verdict.treatment for row in FLAGS}


@pytest.mark.parametrize(
    ("line", "treatment"),
    [("--save FOLDER", "accepted"), ("--ckpt-format torch", "dropped"), ("--ckpt-format torch_dist", "accepted"), ("--fim-*", None)],
)
def test_checkpoints_have_one_format(line, treatment):
    assert BY_LINE.get(line) == treatment
