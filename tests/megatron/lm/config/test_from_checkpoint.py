"""`--use-checkpoint-args`: what is taken of a checkpoint, and what the command line keeps."""

import shlex
from typing import Any

import pytest

from megatron.lm.config import CheckpointConfig
from megatron.lm.config.cli import parse
from megatron.lm.config.from_checkpoint import taken

SAVED: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "seq_length": 24,
        "swiglu": True,
        "rotary_base": 500.0,
        "hidden_dropout": 0.2,
        "vocab_size": 77,
        "attention_backend": "math",
        "init_method_std": 0.5,
    },
    "data": {"tokenizer_type": "NullTokenizer", "data_path": ["theirs"]},
    "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
RUN = "--micro-batch-size 2 --train-iters 4 --lr 1e-3 --data-path corpus --load run --use-checkpoint-args "


def parsed(flags: str, saved: dict[str, dict[str, Any]] | None = SAVED):
    return parse(shlex.split(RUN + flags), lambda settings: saved)


def test_the_model_and_its_tokenizer_come_from_the_checkpoint():
    found = parsed("")
    model = found.config.model
    assert (model.num_layers, model.hidden_size, model.swiglu, model.rotary_base, model.vocab_size) == (3, 48, True, 500.0, 77)
    assert found.config.data.tokenizer_type == "NullTokenizer"
    assert (model.attention_backend, model.init_method_std) == ("auto", 0.02)
    assert (found.config.data.data_path, found.config.parallel.tensor_model_parallel_size) == (("corpus",), 1)
    assert found.lines[0].startswith("from the checkpoint in --load run: --num-layers 3, --hidden-size 48, ")


def test_flags_that_megatron_lm_overrides_give_way_and_are_named_while_sizes_stay():
    found = parsed("--num-layers 4 --hidden-dropout 0.1 --rotary-base 9")
    assert (found.config.model.num_layers, found.config.model.hidden_dropout, found.config.model.rotary_base) == (4, 0.2, 500.0)
    assert "--use-checkpoint-args overrides the command line: --rotary-base 9.0 -> 500.0, --hidden-dropout 0.1 -> 0.2" in found.lines


def test_the_grid_comes_on_demand_and_the_tokenizer_may_stay():
    assert parsed("--use-mp-args-from-checkpoint-args").config.parallel.tensor_model_parallel_size == 2
    kept = parsed("--no-use-tokenizer-model-from-checkpoint-args --tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m").config
    assert (kept.data.tokenizer_type, kept.model.vocab_size) == ("GPT2BPETokenizer", None)


def test_megatron_s_defaults_count_the_end_of_document_of_the_command_line_alone():
    assert parsed("--megatron-defaults").config.model.vocab_size == 77


def test_a_first_start_takes_the_flags_that_are_given(capsys: pytest.CaptureFixture[str]):
    line = "--use-checkpoint-args: --load run contains no checkpoint, so the flags on the command line apply"
    assert taken(CheckpointConfig(load="run"), None).line == line
    with pytest.raises(SystemExit):
        parsed("", None)
    assert "--num-layers" in capsys.readouterr().err


def test_a_tool_that_reads_no_checkpoint_refuses(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(shlex.split(RUN))
    assert "--use-checkpoint-args works only in training, which reads a checkpoint" in capsys.readouterr().err
