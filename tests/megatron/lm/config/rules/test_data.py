"""Refusals about data and tokenizer."""

import pytest

from helpers import refusals
from megatron.lm.config.rules.data import RULES

# flags beside (and over) those of `refusals.GOOD`, processes, what the message must hold
REFUSALS = {
    "dry run, data": ("--dry-run --data-path corpse", 1, "corpse.bin and corpse.idx do not exist"),
    "masks of a GPT": (
        "--mask-prob 0.2",
        1,
        "--mask-prob 0.2 has no effect with --objective causal-lm: drop it, or use --objective masked-lm",
    ),
    "words of a GPT": ("--mask-whole-words", 1, "--mask-whole-words has no effect with --objective causal-lm: drop it, or use"),
    "masked ends": ("--objective masked-lm --eod-mask-loss", 1, "--eod-mask-loss has no effect with --objective masked-lm, which never"),
    "documents apart, flash": (
        "--reset-attention-mask --attention-backend flash",
        1,
        "--reset-attention-mask gives attention a mask, which --attention-backend flash does not support: choose auto, cudnn or math",
    ),
    "documents apart, FP8": (
        "--reset-attention-mask --opt-level O3 --attention-precision fp8",
        1,
        "--reset-attention-mask gives attention a mask, which --attention-precision fp8 does not support: drop one of them",
    ),
    "documents apart, TE": ("--reset-attention-mask --precision te-bf16", 1, "not built for Transformer Engine's attention .te-bf16.: use"),
    "no data": ("--data-path", 1, "no training data: give --data-path PREFIX or --train-data-path PREFIX"),
    "no train data": ("--data-path --valid-data-path corpus", 1, "no training data next to --valid-data-path: give"),
    "data twice": ("--train-data-path corpus", 1, "--data-path and --train-data-path contradict each other: give --data-path with"),
    "mock data beside data": ("--mock-data", 1, "--mock-data and --data-path contradict each other: give one of them"),
    "split alone": ("--data-path --train-data-path corpus --split 9,1", 1, "--split 9,1 has no effect on --train-data-path: drop it, or"),
    "split words": ("--split most,rest", 1, "--split most,rest: give one to three numbers.*such as 969,30,1"),
    "split four": ("--split 1,1,1,1", 1, "--split 1,1,1,1: give one to three numbers"),
    "split sign": ("--split 2,-1", 1, "--split 2,-1: give one to three numbers, 0 or more"),
    "split empty": ("--split 0,1", 1, "--split 0,1: give one to three numbers.*the first above 0"),
    "blend": ("--data-path 0.5 corpus corpus", 1, "--data-path 0.5 corpus corpus: give prefixes alone, or a weight before each prefix"),
    "weight": ("--data-path 0.5 corpus 0 corpus", 1, "the weight 0 is not a number above 0; leave out"),
    "weights missing": ("--data-path 1 corpus corpus corpus", 1, "the weight corpus is not a number above 0; leave out"),
    "data missing": (
        "--data-path corpse",
        1,
        "--data-path corpse: corpse.bin and corpse.idx do not exist; give the prefix of files that megatron.lm.tools.prep",
    ),
    "half data": ("--data-path half", 1, "--data-path half: half.idx do not exist"),
    "tokenizer file": (
        "--tokenizer-type GPT2BPETokenizer --vocab-file v",
        1,
        "--tokenizer-type GPT2BPETokenizer needs.*: add --merge-file",
    ),
    "tokenizer there": (
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model gone.json",
        1,
        "--tokenizer-model gone.json does not exist",
    ),
    "tokenizer of others": (
        "--vocab-file v",
        1,
        "--vocab-file v belongs to GPT2BPETokenizer and has no effect with .*NullTokenizer: drop it",
    ),
    "override": ("--override-data", 1, "--override-data has no effect without --load: drop it"),
    "override beside finetune": (
        "--override-data --load . --finetune",
        1,
        "--override-data has no effect with --finetune, which restarts the data: drop it",
    ),
    "one token": ("--vocab-size 1", 1, "--vocab-size 1 leaves no token except the end of document: give at least 2"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_value_and_remedy(name):
    refusals.assert_refused(*REFUSALS[name])


def test_every_rule_is_proved_by_a_refusal():
    assert refusals.fired(RULES, REFUSALS.values()) == set(RULES)
