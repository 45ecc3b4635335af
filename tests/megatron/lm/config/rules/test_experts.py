"""Refusals about mixtures of experts: flags that contradict each other, and what is not built."""

import pytest

from helpers import refusals
from megatron.lm.config.rules.experts import RULES

MOE = "--num-experts 8 --swiglu --disable-bias-linear"
SIGMOID = f"{MOE} --moe-router-score-function sigmoid"
EP = f"{MOE} --expert-model-parallel-size 2"
GROUPS = f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk"
REFUSALS: list[refusals.Refusal] = [
    ("--moe-router-topk 4", "--moe-router-topk 4 has no effect without experts: add --num-experts N, or drop it"),
    ("--moe-router-pre-softmax", "--moe-router-pre-softmax has no effect without experts"),
    ("--num-experts 1", r"--num-experts 1: give a number in \[2, 4096\]"),
    (f"{MOE} --moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8: give 1 to 8"),
    (f"{MOE} --moe-router-topk 1", "--moe-router-topk 1: a softmax over one expert is always 1.*add --moe-router-pre-softmax"),
    (f"{SIGMOID} --moe-router-pre-softmax", "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid"),
    (f"{MOE} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff 0.1 has no effect with"),
    (f"{MOE} --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias needs scores.*--moe-router-score-function sigmoid"),
    (f"{SIGMOID} --moe-router-bias-update-rate 0.1", "--moe-router-bias-update-rate 0.1 has no effect by itself"),
    (f"{MOE} --moe-router-num-groups 4", "--moe-router-num-groups 4 has no effect by itself: add --moe-router-group-topk"),
    (f"{MOE} --moe-router-group-topk 2", "--moe-router-group-topk 2 has no effect by itself: add --moe-router-num-groups"),
    (f"{MOE} --moe-router-num-groups 3 --moe-router-group-topk 2", "--num-experts 8 is not divisible by --moe-router-num-groups 3"),
    (f"{GROUPS} 5", "--moe-router-group-topk 5 is more than --moe-router-num-groups 4"),
    (f"{GROUPS} 2 --moe-router-topk 3", "--moe-router-topk 3 is not divisible by --moe-router-group-topk 2"),
    (f"{GROUPS} 1 --moe-router-topk 4", "--moe-router-topk 4 does not fit 1 groups of 2 experts: raise"),
    (f"{MOE} --moe-layer-freq [0,1]", r"--moe-layer-freq \[0,1\] has 2 entries for --num-layers 4"),
    (f"{MOE} --moe-layer-freq [0]*4", r"--moe-layer-freq \[0\]\*4 has no layer with experts"),
    ("--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 1 has no effect without experts"),
    (f"{MOE} --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 splits each expert, which is not supported yet: add", 2),
    (f"{MOE} --expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2 is not supported yet: add", 2),
    ("--num-experts 8 --disable-bias-linear", "experts with gelu are not supported yet: add --swiglu"),
    ("--num-experts 8 --swiglu", "experts with biases are not supported yet: add --disable-bias-linear"),
    (f"{MOE} --objective masked-lm", "--objective masked-lm with --num-experts is not supported yet"),
    (f"{MOE} --opt-level O2 --fp8-recipe blockwise", "precision O2 with --num-experts is not supported yet: experts need one scale per"),
    (
        f"{MOE} --opt-level O3 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        "--sequence-parallel with --num-experts in FP8 is not supported yet.*add --expert-model-parallel-size 2",
        2,
    ),
    ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 has no effect without experts: add --num-experts N", 2),
    (f"{MOE} --expert-model-parallel-size 3", "--num-experts 8 is not divisible by --expert-model-parallel-size 3", 3),
    (f"{MOE} --moe-wire bf16", "--moe-wire bf16 has no effect without expert parallelism"),
    (f"{EP} --opt-level O0 --moe-wire fp8", "--moe-wire fp8 has no effect without experts in FP8: use --opt-level O1, O2 or O3", 2),
    (f"{EP} --opt-level O0 --moe-wire fp8-sums", "--moe-wire fp8-sums has no effect without experts in FP8", 2),
    (f"{EP} --opt-level O2 --grad-exchange nccl", "--grad-exchange nccl with --expert-model-parallel-size 2 is not supported yet", 2),
    (
        f"{EP} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        "--tensor-model-parallel-size 2 would send each token several times: add --sequence-parallel",
        2,
    ),
    (f"{MOE} --precision te-bf16", "precision te-bf16 with --num-experts is not supported yet"),
    (f"{MOE} --ckpt-format torch_dist", "--ckpt-format torch_dist with --num-experts is not supported yet: use own"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=[flags for flags, *_ in REFUSALS])
def test_it_is_refused_with_what_to_do(refusal: refusals.Refusal):
    refusals.assert_refused(*refusal)


def test_every_rule_has_a_refusal_here():
    assert refusals.fired(RULES, REFUSALS) == set(RULES)


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        (MOE, 1),
        (f"{SIGMOID} --moe-router-enable-expert-bias --moe-router-topk 1", 1),
        (f"{GROUPS} 2 --moe-router-topk 4 --moe-layer-freq ([0]*1+[1]*3)", 1),
        (f"{MOE} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", 2),
        (f"{MOE} --pipeline-model-parallel-size 2 --use-distributed-optimizer", 4),
        (f"{EP} --opt-level O3 --moe-wire bf16 --pipeline-model-parallel-size 2", 4),
        (f"{EP} --opt-level O2 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", 2),
    ],
)
def test_what_fits_is_accepted(flags: str, processes: int):
    settings = refusals.config(flags)
    assert [problem for rule in RULES for problem in rule(settings, processes)] == []
