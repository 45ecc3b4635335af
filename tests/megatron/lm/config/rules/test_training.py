"""Refusals about batches, schedule, recomputation and determinism."""

import pytest

from helpers import refusals
from megatron.lm.config.rules.training import RULES

PP_2 = "--pipeline-model-parallel-size 2"
# flags beside (and over) those of `refusals.GOOD`, processes, what the message must hold
SAMPLES, RAMP = "--train-samples 80 --global-batch-size 8", "--rampup-batch-size"
REFUSALS = {
    "two lengths": ("--train-samples 80", 1, "--train-iters 5 and --train-samples 80 contradict each other: give --train-iters N or"),
    "ramp in iterations": (
        f"--global-batch-size 8 {RAMP} 2 2 10",
        1,
        "--train-iters 5 counts iterations: give --train-samples 22 for as many iterations, and --lr-warmup-samples and",
    ),
    "samples beside iterations": ("--lr-decay-samples 4", 1, "--lr-decay-samples 4 does not go with --train-iters: give --lr-decay-iters"),
    "warm-up twice": (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 1",
        1,
        "--lr-warmup-fraction 0.1 and --lr-warmup-iters contradict each other",
    ),
    "warm-up from above": ("--lr-warmup-init 0.1", 1, r"--lr-warmup-init 0.1 is above --lr 0.001: give a value in \[0, 0.001\]"),
    "WSD without length": ("--lr-decay-style WSD", 1, "--lr-decay-style WSD needs the length of its decay: add --lr-wsd-decay-iters N"),
    "length without WSD": ("--lr-wsd-decay-iters 2", 1, "--lr-wsd-decay-iters and --lr-wsd-decay-style have no effect without"),
    "long WSD": (
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-warmup-iters 2",
        1,
        "--lr-wsd-decay-iters 4 is more than the 3 iters between warm-up and the end of the decay",
    ),
    "lone minimum": ("--decoupled-min-lr 0.1", 1, "--decoupled-min-lr 0.1 has no effect by itself: add --decoupled-lr"),
    "minimum above": ("--decoupled-lr 0.1 --decoupled-min-lr 0.2", 1, "--decoupled-min-lr 0.2 is above --decoupled-lr 0.1"),
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
        "6 processes do not fit --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2: start 4 or 8, or lower these sizes",
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


# Beside and over those of `refusals.GOOD`, without its --train-iters.
IN_SAMPLES = {
    "no length": ("", 1, "the length of the run is missing: give --train-iters N or --train-samples N"),
    "few samples": ("--train-samples 7 --global-batch-size 8", 1, "--train-samples 7 is less than a global batch of 8: give more"),
    "iterations beside samples": (f"{SAMPLES} --lr-warmup-iters 4", 1, "--lr-warmup-iters 4 does not go with --train-samples: give --lr-w"),
    "warm-up": (
        f"{SAMPLES} --lr-warmup-samples 80",
        1,
        r"--lr-warmup-samples 80 must end before --train-samples 80: give a number in \[0, 79\]",
    ),
    "two numbers": (f"{SAMPLES} {RAMP} 2 2", 1, "--rampup-batch-size 2 2: give three numbers, START INCREMENT SAMPLES"),
    "high start": (f"{SAMPLES} {RAMP} 8 2 9", 1, "--rampup-batch-size 8 2 9 starts at 8 sequences, and --global-batch-size is 8"),
    "odd step": (
        f"{SAMPLES} {RAMP} 2 4 9",
        1,
        "6 sequences from 2 to --global-batch-size 8 are not a multiple of the increment 4: choose a divisor of 6",
    ),
    "many sizes": (
        f"--train-samples 2000000 --global-batch-size 800002 {RAMP} 2 2 9",
        1,
        "--rampup-batch-size 2 2 9 has 400,000 batch sizes: choose an increment of at least 8",
    ),
    "part of a micro-batch": (f"{SAMPLES} {RAMP} 5 1 9", 1, "the start 5 is not divisible by micro-batch x data-parallel size: choose a"),
    "processes that do not fit": (f"{SAMPLES} {RAMP} 2 2 9 {PP_2}", 1, "1 processes do not fit --tensor-model-parallel-size 1 x"),
    "no sequence": (f"{SAMPLES} {RAMP} 0 2 9", 1, r"--rampup-batch-size 0: give a number in \[1, "),
    "interleaved": (
        f"{SAMPLES} {RAMP} 2 2 9 {PP_2} --num-layers-per-virtual-pipeline-stage 1",
        2,
        r"the increment 2 is not divisible by micro-batch x data-parallel size x pipeline stages \(interleaved\): choose a multiple of 4",
    ),
}


@pytest.mark.parametrize("name", IN_SAMPLES)
def test_refusal_of_a_run_in_samples(name, monkeypatch):
    monkeypatch.setattr(refusals, "GOOD", refusals.GOOD.replace("--train-iters 5 ", ""))
    refusals.assert_refused(*IN_SAMPLES[name])


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_value_and_remedy(name):
    refusals.assert_refused(*REFUSALS[name])


def test_every_rule_is_proved_by_a_refusal():
    assert refusals.fired(RULES, REFUSALS.values()) == set(RULES)
