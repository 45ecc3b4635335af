"""Refusals about sequences that are split between processes."""

import pytest

from helpers import refusals
from megatron.lm.config.rules import context
from megatron.lm.config.rules.check import check

CP = "--context-parallel-size 2"
# flags beside (and over) those of `refusals.GOOD`, what the message must hold, processes
REFUSALS: list[refusals.Refusal] = [
    (f"{CP} --seq-length 30", "--seq-length 30 is not divisible by 4, as --context-parallel-size 2 requires: choose 28 or 32$", 2),
    (
        "--context-parallel-size 3 --tensor-model-parallel-size 4 --sequence-parallel",
        "--seq-length 32 is not divisible by 12, as --context-parallel-size 3 with --sequence-parallel over 4 processes requires",
        12,
    ),
    (f"{CP} --attention-dropout 0.1", r"--context-parallel-size 2 does not support --attention-dropout \(0.1\): drop one", 2),
    (f"{CP} --reset-attention-mask", "p2p, a ring of parts of sequences, does not support the mask.*use --cp-comm-type a2a", 2),
    (f"{CP} --precision te-delayed", r"not built for Transformer Engine's attention \(te-delayed\): use another precision", 2),
    ("--opt-level O2 --cp-wire fp8", "--cp-wire fp8 has no effect without --context-parallel-size above 1: drop it"),
    (f"{CP} --precision bf16 --cp-wire fp8", "--cp-wire fp8 has no effect without --opt-level O1, O2 or O3: drop it", 2),
    ("--cp-comm-type a2a", "--cp-comm-type a2a has no effect without --context-parallel-size above 1: drop it"),
    (
        f"{CP} --cp-comm-type a2a --num-attention-heads 4 --group-query-attention --num-query-groups 1",
        "4 heads in 1 groups are not divisible by --context-parallel-size 2: use p2p",
        2,
    ),
    (
        f"{CP} --cp-comm-type a2a --num-attention-heads 2 --tensor-model-parallel-size 2",
        "2 heads are not divisible by --context-parallel-size 2 x --tensor-model-parallel-size 2: use p2p",
        4,
    ),
    ("--cp-wire bf16", "--cp-wire bf16 has no effect without --context-parallel-size above 1: drop it"),
    (
        f"{CP} --opt-level O2 --attention-precision fp8 --cp-wire bf16",
        "--cp-wire bf16 does not fit --attention-precision fp8.*drop one",
        2,
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=[flags for flags, *_ in REFUSALS])
def test_it_is_refused_with_what_to_do(refusal: refusals.Refusal):
    refusals.assert_refused(*refusal)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--cp-comm-type a2a --num-attention-heads 4 --reset-attention-mask",
        "--cp-comm-type a2a --num-attention-heads 4 --opt-level O2 --attention-precision fp8 --cp-wire fp8 --kv-channels 16",
    ],
)
def test_what_fits_passes(flags: str):
    config = refusals.config(f"{CP} --tensor-model-parallel-size 2 --sequence-parallel --dry-run {flags}")
    check(config, 4)
    assert not [problem for rule in context.RULES for problem in rule(config, 4)]
    assert (config.rows, config.tokens) == (8, 32)
