"""Refusals about the shape of the model and what is cut of it."""

from helpers import refusals
from megatron.lm.config.rules.shape import RULES

# flags beside (and over) those of `refusals.GOOD`, what the message must hold, processes (1)
REFUSALS: list[refusals.Refusal] = [
    (
        "--attention-backend flash-attn",
        "--attention-backend flash-attn is a separate package, which has no wheel and is not supported: choose flash, PyTorch's own flash",
    ),
    ("--hidden-size 66", "--hidden-size 66 is not divisible by --num-attention-heads 4: choose a multiple of 4"),
    ("--hidden-size 60", "15 channels per head x --rotary-percent 1 must be an even number; change"),
    ("--preset llama3-8b --no-group-query-attention", "--num-query-groups 8 has no effect by itself: add --group-query-attention"),
    ("--group-query-attention --num-query-groups 3", "--num-attention-heads 4 is not divisible by --num-query-groups 3: choose"),
    ("--max-position-embeddings 16", "--max-position-embeddings 16 is less than --seq-length 32: give at least 32"),
    ("--reset-position-ids", "--reset-position-ids has no effect with --position-embedding-type rope.*drop it"),
    ("--reset-position-ids --position-embedding-type none", "no effect with --position-embedding-type none"),
    ("--qk-layernorm-scope projection", "--qk-layernorm-scope projection has no effect by itself: add --qk-layernorm, or drop it"),
    (
        "--qk-layernorm --qk-layernorm-scope projection --tensor-model-parallel-size 2",
        "--qk-layernorm-scope projection normalizes over all heads, and --tensor-model-parallel-size 2 splits them: drop",
        2,
    ),
    (
        "--qk-layernorm --qk-layernorm-scope projection --ckpt-format torch_dist",
        "--ckpt-format torch_dist has no norms of --qk-layernorm-scope projection, which Megatron-LM lacks: use own",
    ),
    ("--swiglu --squared-relu", "--swiglu and --squared-relu contradict each other: keep one of them"),
    (
        "--objective masked-lm --position-embedding-type none",
        "--position-embedding-type none leaves positions to causal attention.*use rope or learned_absolute",
    ),
    ("--rope-scaling-factor 4", "--rope-scaling-factor 4 has no effect without --use-rope-scaling: add it"),
    ("--use-rope-scaling --rope-scaling-factor 0.5", r"--rope-scaling-factor 0.5: give a number in \[1, "),
    (
        "--use-rope-scaling --position-embedding-type learned_absolute",
        "--use-rope-scaling changes the rotary embedding, and --position-embedding-type learned_absolute has none: drop it, or use rope",
    ),
    (
        "--rotary-seq-len-interpolation-factor 2 --position-embedding-type none",
        "--rotary-seq-len-interpolation-factor changes the rotary embedding, and --position-embedding-type none has none",
    ),
    ("--rotary-seq-len-interpolation-factor 0", "--rotary-seq-len-interpolation-factor 0.0: give a number in "),
    ("--tensor-model-parallel-size 3", "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3: choose 3 or 6$", 3),
    ("--tensor-model-parallel-size 8", "--num-attention-heads 4 is not divisible by --tensor.* 8: choose 8$", 8),
    (
        "--tensor-model-parallel-size 2 --num-attention-heads 25 --hidden-size 1600",
        "--num-attention-heads 25 is not divisible by --tensor-model-parallel-size 2: choose 20 or 32$",
        2,
    ),
    (
        "--tensor-model-parallel-size 3 --num-attention-heads 6 --hidden-size 64",
        "--hidden-size 64 is not divisible by --tensor.* 3: choose 60 or 66$",
        3,
    ),
    ("--tensor-model-parallel-size 3 --kv-channels 16", "--hidden-size 64 is not .* 3: choose 63 or 66$", 3),
    ("--tensor-model-parallel-size 2 --ffn-hidden-size 99", "--ffn-hidden-size 99 is not divisible by --t.* 2: choose 98 or 100$", 2),
    ("--tensor-model-parallel-size 2 --group-query-attention", "--num-query-groups 1 is not divisible by --tensor.* 2: choose 2$", 2),
    (
        "--tensor-model-parallel-size 2 --group-query-attention --num-attention-heads 16 --num-query-groups 1",
        "--num-query-groups 1 is not divisible by --tensor-model-parallel-size 2: choose 2$",
        2,
    ),
    (
        "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31",
        "--seq-length 31 is not divisible by --tensor-model-parallel-size 2: choose 30 or 32$",
        2,
    ),
    (
        "--preset 13b --tensor-model-parallel-size 1",
        "--sequence-parallel splits sequences between tensor-parallel processes, and there is only one: .*--no-sequence-parallel.*",
    ),
    ("--pipeline-model-parallel-size 3", "--num-layers 4 is not divisible by --pipeline-model-parallel-size 3: choose 3 or 6$", 3),
    (
        "--pipeline-model-parallel-size 3 --num-layers 10 --num-layers-per-virtual-pipeline-stage 2",
        "--num-layers 10 is not divisible by --pipeline-model-parallel-size 3: choose 12$",
        3,
    ),
    ("--num-layers-per-virtual-pipeline-stage 2", "-stage 2 interleaves pipeline stages, and there is only one: drop it, or raise"),
    (
        "--pipeline-model-parallel-size 2 --num-layers 12 --num-layers-per-virtual-pipeline-stage 4",
        "virtual-pipeline-stage 4 does not divide the 6 layers of a pipeline stage: choose 3, or drop it",
        2,
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers 24 --num-layers-per-virtual-pipeline-stage 5",
        "virtual-pipeline-stage 5 does not divide the 12 layers of a pipeline stage: choose 4 or 6, or drop it",
        2,
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        "virtual-pipeline-stage 2 leaves nothing to interleave: it is a whole pipeline stage: choose 1, or drop it",
        2,
    ),
    (
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
        "virtual-pipeline-stage 1 leaves nothing to interleave: it is a whole pipeline stage: drop it",
        4,
    ),
]


test_refusal_names_value_and_fix, test_every_rule_is_proved_by_a_refusal = refusals.proof(RULES, REFUSALS)
