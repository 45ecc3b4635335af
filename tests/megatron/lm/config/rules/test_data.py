"""Refusals about data and tokenizer."""

from helpers import refusals
from megatron.lm.config.rules.data import RULES

# flags beside (and over) those of `refusals.GOOD`, what the message must hold, processes (1)
REFUSALS: list[refusals.Refusal] = [
    ("--dry-run --data-path corpse", "corpse.bin and corpse.idx do not exist"),
    ("--mask-prob 0.2", "--mask-prob 0.2 has no effect with --objective causal-lm: drop it, or use --objective masked-lm"),
    ("--mask-whole-words", "--mask-whole-words has no effect with --objective causal-lm: drop it, or use"),
    ("--objective masked-lm --eod-mask-loss", "--eod-mask-loss has no effect with --objective masked-lm, which never"),
    (
        "--reset-attention-mask --attention-backend flash",
        "--reset-attention-mask gives attention a mask, which --attention-backend flash does not support: choose auto, cudnn or math",
    ),
    (
        "--reset-attention-mask --opt-level O3 --attention-precision fp8",
        "--reset-attention-mask gives attention a mask, which --attention-precision fp8 does not support: drop one of them",
    ),
    ("--reset-attention-mask --precision te-bf16", "not built for Transformer Engine's attention .te-bf16.: use"),
    ("--data-path", "no training data: give --data-path PREFIX or --train-data-path PREFIX"),
    ("--data-path --valid-data-path corpus", "no training data next to --valid-data-path: give"),
    ("--train-data-path corpus", "--data-path and --train-data-path contradict each other: give --data-path with"),
    ("--mock-data", "--mock-data and --data-path contradict each other: give one of them"),
    ("--data-path --train-data-path corpus --split 9,1", "--split 9,1 has no effect on --train-data-path: drop it, or"),
    ("--split most,rest", "--split most,rest: give one to three numbers.*such as 969,30,1"),
    ("--split 1,1,1,1", "--split 1,1,1,1: give one to three numbers"),
    ("--split 2,-1", "--split 2,-1: give one to three numbers, 0 or more"),
    ("--split 0,1", "--split 0,1: give one to three numbers.*the first above 0"),
    ("--data-path 0.5 corpus corpus", "--data-path 0.5 corpus corpus: give prefixes alone, or a weight before each prefix"),
    ("--data-path 0.5 corpus 0 corpus", "the weight 0 is not a number above 0; leave out"),
    ("--data-path 1 corpus corpus corpus", "the weight corpus is not a number above 0; leave out"),
    (
        "--data-path corpse",
        "--data-path corpse: corpse.bin and corpse.idx do not exist; give the prefix of files that megatron.lm.tools.prep",
    ),
    ("--data-path half", "--data-path half: half.idx do not exist"),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file v", "--tokenizer-type GPT2BPETokenizer needs.*: add --merge-file"),
    ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model gone.json", "--tokenizer-model gone.json does not exist"),
    ("--vocab-file v", "--vocab-file v belongs to GPT2BPETokenizer and has no effect with .*NullTokenizer: drop it"),
    ("--override-data", "--override-data has no effect without --load: drop it"),
    ("--override-data --load . --finetune", "--override-data has no effect with --finetune, which restarts the data: drop it"),
    ("--vocab-size 1", "--vocab-size 1 leaves no token except the end of document: give at least 2"),
]


test_refusal_names_value_and_fix, test_every_rule_is_proved_by_a_refusal = refusals.proof(RULES, REFUSALS)
