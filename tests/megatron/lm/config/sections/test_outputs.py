"""When a run goes on from its own checkpoints."""

import pytest

from megatron.lm.config import CheckpointConfig


@pytest.mark.parametrize(
    ("settings", "resumes"),
    [
        ({}, False),
        ({"save": "a"}, False),
        ({"load": "a"}, False),
        ({"save": "a", "load": "b"}, False),
        ({"save": "a", "load": "a/"}, True),
        ({"save": "a", "load": "b/../a"}, True),
        ({"save": "a", "load": "a", "finetune": True}, False),
    ],
)
def test_a_run_resumes_itself_where_it_loads_what_it_saves(settings, resumes):
    assert CheckpointConfig(**settings).resumes_itself is resumes
