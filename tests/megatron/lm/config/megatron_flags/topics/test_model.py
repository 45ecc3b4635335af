"""The lines of model: a sample, told apart by their values."""

import pytest

from megatron.lm.config.megatron_flags.topics.model import FLAGS

BY_LINE = {row.line: row.verdict.treatment for row in FLAGS}


@pytest.mark.parametrize(
    ("line", "treatment"), [("--swiglu", "accepted"), ("--use-flash-attn", "dropped"), ("--multi-latent-attention", "refused")]
)
def test_the_model_has_the_layers_of_gpt_alone(line, treatment):
    assert BY_LINE[line] == treatment
