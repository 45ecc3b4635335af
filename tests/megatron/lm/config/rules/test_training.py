"""Refusals about batches, schedule, recomputation and determinism."""

import pytest

from helpers import refusals
from megatron.lm.config.rules.training import RULES

PP_2 = "--pipeline-model-parallel-size 2"
# flags beside (and over) those of `refusals.GOOD`, processes, what the message must hold
REFUSALS = {
    "any order": ("--deterministic --attention-backend cudnn", 1, "--deterministic with --attention-backend cudnn.*choose auto or flash"),
    "lone recompute": ("--recompute-method block", 1, "--recompute-method block has no effect by itself: add --recompute-granularity"),
    "lone modules": (
        "--recompute-modules core_attn mlp",
        1,
        "--recompute-modules core_attn mlp has no effect by itself: add --recompute-granularity selective, or drop it",
    ),
    "modules of whole layers": (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-modules mlp",
        1,
        "--recompute-modules mlp has no effect by itself",
    ),
    "half recompute": ("--recompute-granularity full", 1, "--recompute-granularity full needs --recompute-method: add --recompute-method"),
    "recompute": (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
        1,
        "--recompute-num-layers 5 is more than the 4 layers of a pipeline stage: give 1 to 4",
    ),
    "recompute, virtual": (
        f"{PP_2} --num-layers-per-virtual-pipeline-stage 1 --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        2,
        "--recompute-num-layers 2 is more than the 1 layers of a virtual pipeline stage: give 1 to 1",
    ),
    "virtual micro-batches": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6",
        2,
        "the 3 micro-batches of a step to be a multiple of --pipeline-model-parallel-size 2: choose --global-batch-size as a multiple of 4",
    ),
    "world": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        "6 processes do not fit --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2: start 4 or 8, or lower the two sizes",
    ),
    "global batch": (
        "--global-batch-size 10",
        2,
        "--global-batch-size 10 is not divisible by --micro-batch-size 2 x 2 data-parallel processes: choose a multiple of 4",
    ),
    "world, few": ("--tensor-model-parallel-size 4", 2, "2 processes do not fit --tensor-model-parallel-size 4 .* 1: start 4, or lower"),
    "min lr": ("--min-lr 0.01", 1, r"--min-lr 0.01 is above --lr 0.001: give a value in \[0, 0.001\]"),
    "warm-up": ("--lr-warmup-iters 5", 1, r"--lr-warmup-iters 5 must end before --train-iters 5: give a number in \[0, 4\]"),
    "warm-up, decay": ("--lr-warmup-iters 3 --lr-decay-iters 3", 1, r"must end before --lr-decay-iters 3: give a number in \[0, 2\]"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_value_and_remedy(name):
    refusals.assert_refused(*REFUSALS[name])


def test_every_rule_is_proved_by_a_refusal():
    assert refusals.fired(RULES, REFUSALS.values()) == set(RULES)
