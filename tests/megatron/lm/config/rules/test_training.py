"""Refusals about batches, schedule, recomputation and determinism."""

import pytest

from helpers import refusals
from megatron.lm.config.rules.training import RULES

PP_2 = "--pipeline-model-parallel-size 2"
# flags beside (and over) those of `refusals.GOOD`, what the message must hold, processes (1)
SAMPLES, RAMP = "--train-samples 80 --global-batch-size 8", "--rampup-batch-size"
REFUSALS: list[refusals.Refusal] = [
    ("--train-samples 80", "--train-iters 5 and --train-samples 80 contradict each other: give --train-iters N or"),
    (
        f"--global-batch-size 8 {RAMP} 2 2 10",
        "--train-iters 5 counts iterations: give --train-samples 22 for as many iterations, and --lr-warmup-samples and",
    ),
    ("--lr-decay-samples 4", "--lr-decay-samples 4 does not go with --train-iters: give --lr-decay-iters"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", "--lr-warmup-fraction 0.1 and --lr-warmup-iters contradict each other"),
    ("--lr-warmup-init 0.1", r"--lr-warmup-init 0.1 is above --lr 0.001: give a value in \[0, 0.001\]"),
    ("--lr-decay-style WSD", "--lr-decay-style WSD needs the length of its decay: add --lr-wsd-decay-iters N"),
    ("--lr-wsd-decay-iters 2", "--lr-wsd-decay-iters and --lr-wsd-decay-style have no effect without"),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-warmup-iters 2",
        "--lr-wsd-decay-iters 4 is more than the 3 iters between warm-up and the end of the decay",
    ),
    ("--decoupled-min-lr 0.1", "--decoupled-min-lr 0.1 has no effect by itself: add --decoupled-lr"),
    ("--decoupled-lr 0.1 --decoupled-min-lr 0.2", "--decoupled-min-lr 0.2 is above --decoupled-lr 0.1"),
    ("--deterministic --attention-backend cudnn", "--deterministic with --attention-backend cudnn.*choose auto or flash"),
    ("--recompute-method block", "--recompute-method block has no effect by itself: add --recompute-granularity"),
    (
        "--recompute-modules core_attn mlp",
        "--recompute-modules core_attn mlp has no effect by itself: add --recompute-granularity selective, or drop it",
    ),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-modules mlp",
        "--recompute-modules mlp has no effect by itself",
    ),
    ("--recompute-granularity full", "--recompute-granularity full needs --recompute-method: add --recompute-method"),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
        "--recompute-num-layers 5 is more than the 4 layers of a pipeline stage: give 1 to 4",
    ),
    (
        f"{PP_2} --num-layers-per-virtual-pipeline-stage 1 --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--recompute-num-layers 2 is more than the 1 layers of a virtual pipeline stage: give 1 to 1",
        2,
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6",
        "the 3 micro-batches of a step to be a multiple of --pipeline-model-parallel-size 2: choose --global-batch-size as a multiple of 4",
        2,
    ),
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "6 processes do not fit --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2: start 4 or 8, or lower these sizes",
        6,
    ),
    (
        "--global-batch-size 10",
        "--global-batch-size 10 is not divisible by --micro-batch-size 2 x 2 data-parallel processes: choose a multiple of 4",
        2,
    ),
    ("--tensor-model-parallel-size 4", "2 processes do not fit --tensor-model-parallel-size 4 .* 1: start 4, or lower", 2),
    ("--min-lr 0.01", r"--min-lr 0.01 is above --lr 0.001: give a value in \[0, 0.001\]"),
    ("--lr-warmup-iters 5", r"--lr-warmup-iters 5 must end before --train-iters 5: give a number in \[0, 4\]"),
    ("--lr-warmup-iters 3 --lr-decay-iters 3", r"must end before --lr-decay-iters 3: give a number in \[0, 2\]"),
]


# Beside and over those of `refusals.GOOD`, without its --train-iters.
IN_SAMPLES: list[refusals.Refusal] = [
    ("", "the length of the run is missing: give --train-iters N or --train-samples N"),
    ("--train-samples 7 --global-batch-size 8", "--train-samples 7 is less than a global batch of 8: give more"),
    (f"{SAMPLES} --lr-warmup-iters 4", "--lr-warmup-iters 4 does not go with --train-samples: give --lr-w"),
    (f"{SAMPLES} --lr-warmup-samples 80", r"--lr-warmup-samples 80 must end before --train-samples 80: give a number in \[0, 79\]"),
    (f"{SAMPLES} {RAMP} 2 2", "--rampup-batch-size 2 2: give three numbers, START INCREMENT SAMPLES"),
    (f"{SAMPLES} {RAMP} 8 2 9", "--rampup-batch-size 8 2 9 starts at 8 sequences, and --global-batch-size is 8"),
    (f"{SAMPLES} {RAMP} 2 4 9", "6 sequences from 2 to --global-batch-size 8 are not a multiple of the increment 4: choose a divisor of 6"),
    (
        f"--train-samples 2000000 --global-batch-size 800002 {RAMP} 2 2 9",
        "--rampup-batch-size 2 2 9 has 400,000 batch sizes: choose an increment of at least 8",
    ),
    (f"{SAMPLES} {RAMP} 5 1 9", "the start 5 is not divisible by micro-batch x data-parallel size: choose a"),
    (f"{SAMPLES} {RAMP} 2 2 9 {PP_2}", "1 processes do not fit --tensor-model-parallel-size 1 x"),
    (f"{SAMPLES} {RAMP} 0 2 9", r"--rampup-batch-size 0: give a number in \[1, "),
    (
        f"{SAMPLES} {RAMP} 2 2 9 {PP_2} --num-layers-per-virtual-pipeline-stage 1",
        r"the increment 2 is not divisible by micro-batch x data-parallel size x pipeline stages \(interleaved\): choose a multiple of 4",
        2,
    ),
]


@pytest.mark.parametrize("refusal", IN_SAMPLES, ids=str)
def test_refusal_of_a_run_in_samples(refusal, monkeypatch):
    monkeypatch.setattr(refusals, "GOOD", refusals.GOOD.replace("--train-iters 5 ", ""))
    refusals.assert_refused(*refusal)


test_refusal_names_value_and_fix, test_every_rule_is_proved_by_a_refusal = refusals.proof(RULES, REFUSALS)
