"""Defaults that differ from Megatron-LM's."""

import shlex

import pytest

from megatron.lm.config.cli import parse, parse_args, to_argv
from megatron.lm.config.megatron_flags.defaults import DEFAULTS

REQUIRED = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 5 --lr 1e-3 "


def settings(flags: str):
    return parse_args(shlex.split(REQUIRED + flags))


def last_line(flags: str) -> str:
    return (parse(shlex.split(REQUIRED + flags)).lines or ("",))[-1]


def test_one_line_lists_what_differs_where_the_flag_is_absent():
    line = last_line("")
    assert line.startswith("defaults that differ, Megatron-LM -> here (--megatron-defaults uses Megatron-LM's): ")
    for listed in ("--position-embedding-type learned_absolute -> rope", "--hidden-dropout 0.1 -> 0", "precision FP32 -> bf16"):
        assert listed in line
    assert "loss-scale" not in line
    assert "end of document" not in line


@pytest.mark.parametrize(
    ("flags", "absent"),
    [
        ("--hidden-dropout 0", "--hidden-dropout"),
        ("--use-rotary-position-embeddings", "--position-embedding-type"),
        ("--bf16", "precision"),
        ("--opt-level O2", "precision"),
        ("--no-overlap-grad-reduce", "--overlap-grad-reduce"),
        ("--preset llama3-8b --num_workers 1", "--num-workers"),
    ],
)
def test_a_flag_that_is_given_is_not_listed(flags, absent):
    assert f" {absent} " not in last_line(flags)


def test_defaults_of_a_feature_are_listed_where_it_is_used():
    assert "--initial-loss-scale 2^32 -> 2^16" in last_line("--fp16")
    assert "--initial-loss-scale" not in last_line("--fp16 --loss-scale 8")
    assert "--fp8-amax-history-len 1 -> 16" in last_line("--opt-level O2")
    assert "--fp8-amax-history-len" not in last_line("--opt-level O2 --fp8-recipe tensorwise")
    assert "NullTokenizer's end of document V -> V - 1" in last_line("--tokenizer-type NullTokenizer --vocab-size 100")


def test_megatron_defaults_are_taken_where_the_flag_is_absent():
    config = settings("--megatron-defaults --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 100")
    assert config.model.position_embedding_type == "learned_absolute"
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.1, 0.0)
    assert config.precision.name == "fp32"
    assert config.model.vocab_size == 101  # the end of document is 100, as in Megatron-LM
    assert config.data.num_workers == 2
    assert not config.communication.overlap_grad_reduce
    assert last_line("--megatron-defaults") == ""
    assert parse_args(to_argv(config)) == config


def test_megatron_defaults_follow_the_precision_that_is_given():
    assert settings("--megatron-defaults --bf16").precision.name == "bf16"
    fp16 = settings("--megatron-defaults --fp16").precision
    assert (fp16.initial_loss_scale, fp16.loss_scale_window) == (2.0**32, 1000)
    fp8 = settings("--megatron_defaults --opt-level O2").precision
    assert (fp8.fp8_amax_history_len, fp8.fp8_amax_compute_algo) == (1, "most_recent")
    assert settings("--megatron-defaults --overlap-grad-reduce").communication.overlap_grad_reduce


def test_a_preset_keeps_what_it_sets():
    assert settings("--megatron-defaults --preset llama3-8b").model.rotary_base == 5e5


def test_each_default_that_is_listed_is_not_megatrons():
    assert [default.what for default in DEFAULTS if default.megatron == default.ours] == []
