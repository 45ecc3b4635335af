"""Public launch scripts of Megatron-LM start here: what is built runs, the rest is refused by name in one message."""

import re

import pytest

from helpers.megatron_scripts import SCRIPTS
from megatron.lm.config.cli import known_flags, parse_args
from megatron.lm.config.megatron_flags.apply import apply
from megatron.lm.config.rules.check import check

# Dense GPTs and BERT: flags that may still be refused until their feature is built.
DENSE = {
    "gpt3-175b": set(),
    "bert-340m": set(),
    "llama3-8b-fp8": {"--fp8-format", "--fp8-param-gather", "--profile", "--profile-step-start", "--profile-step-end"},
    "llama3.1-8b": set(),
    "qwen3-8b": set(),
}
OTHERS = {
    "t5-220m": {"--decoder-num-layers", "--vocab-extra-ids"},
    "llama3.1-8b-rl": {"--grpo-group-size", "--rl-use-sequence-packing"},
    "mixtral-8x7b": {"--num-experts", "--moe-router-topk", "--expert-model-parallel-size"},
    "gpt-oss-20b": {"--num-experts", "--softmax-type", "--window-size", "--glu-linear-offset"},
    "qwen3-30b-a3b": {"--num-experts", "--moe-router-topk"},
    "deepseek-v2-lite": {"--num-experts", "--multi-latent-attention"},
    "mamba-8b": {"--hybrid-layer-pattern", "--spec"},
}
TOY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 --seq-length 32 "
    "--max-position-embeddings 32 --make-vocab-size-divisible-by 8 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-4 --min-lr 1e-5 --attention-backend auto "
)
ITERATIONS = "--train-iters 3 --lr-decay-iters 3"
SAMPLES = "--train-samples 12 --lr-decay-samples 12 --lr-warmup-samples 4"
OF_FILES = {"--data-path", "--vocab-file", "--merge-file", "--tokenizer-type", "--vocab-size", "--save", "--load", "--save-interval"}


def refused(line: str) -> set[str]:
    """The flags that a start of the script names in its one message."""
    try:
        apply(line.split(), known_flags())
    except ValueError as error:
        assert "unknown flag" not in str(error)  # noqa: PT017
        return set(re.findall(r"(?:^|\n- )(--[a-z0-9-]+)", str(error)))
    return set()


def without(line: str, flags: set[str]) -> str:
    """The line without some flags and their values."""
    return " ".join(part for part in re.split(r" (?=--)", line.strip()) if part.split()[0] not in flags)


def test_there_are_twelve_scripts():
    assert DENSE.keys() | OTHERS.keys() == SCRIPTS.keys()
    assert len(SCRIPTS) == 12


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_script_is_refused_for_nothing_but_what_is_not_built(name):
    assert refused(SCRIPTS[name]) <= DENSE[name]


@pytest.mark.parametrize("name", OTHERS)
def test_a_script_of_another_model_is_refused_by_name_in_one_message(name):
    assert refused(SCRIPTS[name]) >= OTHERS[name]


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_script_at_toy_size_is_a_valid_run(name):
    line = without(SCRIPTS[name], OF_FILES | DENSE[name] | {"--tensorboard-dir", "--data-cache-path"})
    if "--fp8-format" in SCRIPTS[name]:
        line = f"{without(line, {'--bf16'})} --opt-level O1"
    if "--rampup-batch-size" in line:  # Megatron-LM refuses a ramp beside --train-iters too
        with pytest.raises(ValueError, match=r"--train-iters 3 counts iterations: give --train-samples 8 for as many iterations"):
            check(parse_args(f"{line} {TOY} {ITERATIONS} --rampup-batch-size 2 2 3 --dry-run".split()), 1)
        line = f"{without(line, {'--train-iters', '--lr-decay-iters', '--rampup-batch-size'})} --train-samples 8 --rampup-batch-size 2 2 3"
    length = SAMPLES if "--lr-decay-samples" in line else "" if "--train-samples" in line else ITERATIONS
    config = parse_args(f"{line} {TOY} {length} --dry-run".split())
    check(config, 1)
    assert config.iterations(1) == 3
