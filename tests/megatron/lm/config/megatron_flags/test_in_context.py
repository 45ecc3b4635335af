"""Flags whose meaning depends on others."""

import pytest

from megatron.lm.config.cli import known_flags
from megatron.lm.config.megatron_flags.apply import apply


def argv(line: str, preset=None) -> str:
    return " ".join(apply(line.split(), known_flags(), preset or {}).argv)


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("--sequence-parallel", ""),
        ("--sequence-parallel --tensor-model-parallel-size 1", "--tensor-model-parallel-size 1"),
        ("--sequence-parallel --tensor-model-parallel-size 2", "--sequence-parallel --tensor-model-parallel-size 2"),
        ("--num-query-groups 2", ""),
        ("--group-query-attention --num-query-groups 2", "--group-query-attention --num-query-groups 2"),
        ("--no-position-embedding --position-embedding-type rope", "--position-embedding-type rope"),
        ("--vocab-size 7 --tokenizer-type NullTokenizer", "--vocab-size 7 --tokenizer-type NullTokenizer"),
        ("--vocab-size 7 --tokenizer-type HuggingFaceTokenizer", "--tokenizer-type HuggingFaceTokenizer"),
        ("--split '99,1,0'", "--split 99,1,0"),
        ("--calculate-per-token-loss", ""),
        (
            "--weight-decay 0.1 --start-weight-decay 0.1 --end-weight-decay 0.1 --weight-decay-incr-style constant",
            "--weight-decay 0.1 " * 3,
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        ),
        ("--num-virtual-stages-per-pipeline-rank 1", ""),
        ("--seq-length 8 --decoder-seq-length 8", "--seq-length 8"),
    ],
)
def test_a_flag_is_read_with_those_it_depends_on(line, becomes):
    assert argv(line) == becomes.strip()


def test_a_preset_counts_as_written():
    preset = {"tensor_model_parallel_size": 8, "group_query_attention": True}
    assert argv("--sequence-parallel --num-query-groups 4", preset) == "--sequence-parallel --num-query-groups 4"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--no-position-embedding --position-embedding-type learned_absolute", "contradicts --position-embedding-type learned_absolute"),
        ("--calculate-per-token-loss --eod-mask-loss", "with --eod-mask-loss, micro-batches have unequal numbers of tokens"),
        ("--start-weight-decay 0.01 --end-weight-decay 0.1", "weight decay is constant here"),
        ("--weight-decay 0.2 --start-weight-decay 0.1 --end-weight-decay 0.1", "weight decay is constant here"),
        ("--num-layers 6 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", "choose a multiple of 4"),
        ("--num-virtual-stages-per-pipeline-rank 0", "give a whole number above 0"),
        ("--seq-length 8 --decoder-seq-length 4", "GPT has a single sequence length"),
    ],
)
def test_a_contradiction_is_refused(line, words):
    with pytest.raises(ValueError, match=words):
        argv(line)
