"""Refusals about the shape of the model and what is cut of it."""

import pytest

from helpers import refusals
from megatron.lm.config.rules.shape import RULES

# flags beside (and over) those of `refusals.GOOD`, processes, what the message must hold
REFUSALS = {
    "a package": (
        "--attention-backend flash-attn",
        1,
        "--attention-backend flash-attn is a separate package, which has no wheel and is not supported: choose flash, PyTorch's own flash",
    ),
    "heads": ("--hidden-size 66", 1, "--hidden-size 66 is not divisible by --num-attention-heads 4: choose a multiple of 4"),
    "rotary width": ("--hidden-size 60", 1, "15 channels per head x --rotary-percent 1 must be an even number; change"),
    "lone groups": (
        "--preset llama3-8b --no-group-query-attention",
        1,
        "--num-query-groups 8 has no effect by itself: add --group-query-attention",
    ),
    "groups": (
        "--group-query-attention --num-query-groups 3",
        1,
        "--num-attention-heads 4 is not divisible by --num-query-groups 3: choose",
    ),
    "positions": ("--max-position-embeddings 16", 1, "--max-position-embeddings 16 is less than --seq-length 32: give at least 32"),
    "reset": ("--reset-position-ids", 1, "--reset-position-ids has no effect with --position-embedding-type rope.*drop it"),
    "reset without positions": ("--reset-position-ids --position-embedding-type none", 1, "no effect with --position-embedding-type none"),
    "two activations": ("--swiglu --squared-relu", 1, "--swiglu and --squared-relu contradict each other: keep one of them"),
    "no positions": (
        "--objective masked-lm --position-embedding-type none",
        1,
        "--position-embedding-type none leaves positions to causal attention.*use rope or learned_absolute",
    ),
    "lone factor": ("--rope-scaling-factor 4", 1, "--rope-scaling-factor 4 has no effect without --use-rope-scaling: add it"),
    "low factor": ("--use-rope-scaling --rope-scaling-factor 0.5", 1, r"--rope-scaling-factor 0.5: give a number in \[1, "),
    "stretched table": (
        "--use-rope-scaling --position-embedding-type learned_absolute",
        1,
        "--use-rope-scaling changes the rotary embedding, and --position-embedding-type learned_absolute has none: drop it, or use rope",
    ),
    "interpolated nothing": (
        "--rotary-seq-len-interpolation-factor 2 --position-embedding-type none",
        1,
        "--rotary-seq-len-interpolation-factor changes the rotary embedding, and --position-embedding-type none has none",
    ),
    "no factor": ("--rotary-seq-len-interpolation-factor 0", 1, "--rotary-seq-len-interpolation-factor 0.0: give a number in "),
    "TP heads": (
        "--tensor-model-parallel-size 3",
        3,
        "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3: choose 3 or 6$",
    ),
    "TP heads, few": ("--tensor-model-parallel-size 8", 8, "--num-attention-heads 4 is not divisible by --tensor.* 8: choose 8$"),
    "TP heads that divide": (
        "--tensor-model-parallel-size 2 --num-attention-heads 25 --hidden-size 1600",
        2,
        "--num-attention-heads 25 is not divisible by --tensor-model-parallel-size 2: choose 20 or 32$",
    ),
    "TP hidden": (
        "--tensor-model-parallel-size 3 --num-attention-heads 6 --hidden-size 64",
        3,
        "--hidden-size 64 is not divisible by --tensor.* 3: choose 60 or 66$",
    ),
    "TP hidden, channels": ("--tensor-model-parallel-size 3 --kv-channels 16", 3, "--hidden-size 64 is not .* 3: choose 63 or 66$"),
    "TP ffn": (
        "--tensor-model-parallel-size 2 --ffn-hidden-size 99",
        2,
        "--ffn-hidden-size 99 is not divisible by --t.* 2: choose 98 or 100$",
    ),
    "TP groups": (
        "--tensor-model-parallel-size 2 --group-query-attention",
        2,
        "--num-query-groups 1 is not divisible by --tensor.* 2: choose 2$",
    ),
    "TP groups, both": (
        "--tensor-model-parallel-size 2 --group-query-attention --num-attention-heads 16 --num-query-groups 1",
        2,
        "--num-query-groups 1 is not divisible by --tensor-model-parallel-size 2: choose 2$",
    ),
    "SP length": (
        "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31",
        2,
        "--seq-length 31 is not divisible by --tensor-model-parallel-size 2: choose 30 or 32$",
    ),
    "SP alone": (
        "--preset 13b --tensor-model-parallel-size 1",
        1,
        "--sequence-parallel splits sequences between tensor-parallel processes, and there is only one: .*--no-sequence-parallel.*",
    ),
    "PP layers": (
        "--pipeline-model-parallel-size 3",
        3,
        "--num-layers 4 is not divisible by --pipeline-model-parallel-size 3: choose 3 or 6$",
    ),
    "PP layers, virtual": (
        "--pipeline-model-parallel-size 3 --num-layers 10 --num-layers-per-virtual-pipeline-stage 2",
        3,
        "--num-layers 10 is not divisible by --pipeline-model-parallel-size 3: choose 12$",
    ),
    "lone virtual": (
        "--num-layers-per-virtual-pipeline-stage 2",
        1,
        "-stage 2 interleaves pipeline stages, and there is only one: drop it, or raise",
    ),
    "virtual": (
        "--pipeline-model-parallel-size 2 --num-layers 12 --num-layers-per-virtual-pipeline-stage 4",
        2,
        "virtual-pipeline-stage 4 does not divide the 6 layers of a pipeline stage: choose 3, or drop it",
    ),
    "virtual, two": (
        "--pipeline-model-parallel-size 2 --num-layers 24 --num-layers-per-virtual-pipeline-stage 5",
        2,
        "virtual-pipeline-stage 5 does not divide the 12 layers of a pipeline stage: choose 4 or 6, or drop it",
    ),
    "virtual, whole": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        2,
        "virtual-pipeline-stage 2 leaves nothing to interleave: it is a whole pipeline stage: choose 1, or drop it",
    ),
    "virtual, one layer": (
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
        4,
        "virtual-pipeline-stage 1 leaves nothing to interleave: it is a whole pipeline stage: drop it",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_value_and_remedy(name):
    refusals.assert_refused(*REFUSALS[name])


def test_every_rule_is_proved_by_a_refusal():
    assert refusals.fired(RULES, REFUSALS.values()) == set(RULES)
