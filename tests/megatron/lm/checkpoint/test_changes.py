"""What a resumed run prints about its checkpoint."""

import dataclasses
from pathlib import Path

from megatron.lm.checkpoint.content import description, shrinking_attention
from megatron.lm.config.cli import config_to_dict, parse_args


def test_a_long_run_with_the_old_fp8_attention_is_named_with_the_command_that_compares():
    config = parse_args(["--preset", "llama3-8b", "--opt-level", "O3", "--seq-length", "8192", "--attention-precision", "fp8"])
    new = description(config_to_dict(config), 128256, 1)
    old = {name: value for name, value in new.items() if name != "fp8_attention"}
    assert shrinking_attention(new, Path("here")) is None
    assert "--load here --attention-precision bf16" in (shrinking_attention(old, Path("here")) or "")
    short = {"model": dataclasses.replace(config.model, seq_length=2048)}
    wide = {"precision": dataclasses.replace(config.precision, attention_precision="bf16")}
    for other in (short, wide):
        written = description(config_to_dict(dataclasses.replace(config, **other)), 128256, 1)
        assert shrinking_attention({name: value for name, value in written.items() if name != "fp8_attention"}, Path("here")) is None
