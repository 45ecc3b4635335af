"""Rules for context parallelism: how it splits sequences and heads, and what its attention does not support."""

import math

from megatron.lm.config.rules.precision import refusal
from megatron.lm.config.rules.shape import nearest_multiples
from megatron.lm.config.whole import Config, Problems, Rules


def chunks(config: Config, world_size: int) -> Problems:
    """Each process has two chunks of every sequence, which sequence parallelism splits further."""
    parallel, length = config.parallel, config.model.seq_length
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    multiple = math.lcm(2 * cp, cp * tp)
    if cp > 1 and length % multiple:
        split = f"--context-parallel-size {cp}" + (f" with --sequence-parallel over {tp} processes" if tp > 1 else "")
        yield f"--seq-length {length} is not divisible by {multiple}, as {split} requires: choose {nearest_multiples(length, multiple)}"


def heads(config: Config, world_size: int) -> Problems:
    """With an all-to-all, each process has its share of the heads of its tensor-parallel part."""
    parallel, model = config.parallel, config.model
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if parallel.cp_comm_type != "a2a":
        return
    if cp == 1:
        yield "--cp-comm-type a2a has no effect without --context-parallel-size above 1: drop it, or add --context-parallel-size above 1"
        return
    if model.query_groups % (tp * cp) or model.num_attention_heads % (tp * cp):
        groups = "" if model.query_groups == model.num_attention_heads else f" in {model.query_groups} groups"
        per = f"--context-parallel-size {cp}" + (f" x --tensor-model-parallel-size {tp}" if tp > 1 else "")
        yield (
            f"--cp-comm-type a2a divides heads between processes, and {model.num_attention_heads} heads{groups} are not divisible by "
            f"{per}: use p2p, or another number of processes"
        )


def attention(config: Config, world_size: int) -> Problems:
    """Attention over split sequences has no dropout and is in our layers, and a ring takes no mask."""
    from megatron.lm.config.sections.baselines import PeerRecipe  # torch

    cp, model, precision = config.parallel.context_parallel_size, config.model, config.precision
    if cp == 1:
        return
    given = f"--context-parallel-size {cp}"
    if model.attention_dropout:
        yield f"{given} does not support --attention-dropout ({model.attention_dropout:g}): drop one"
    if config.data.reset_attention_mask and config.parallel.cp_comm_type == "p2p":
        yield (
            f"{given} with --cp-comm-type p2p, a ring of parts of sequences, does not support the mask of --reset-attention-mask: use "
            "--cp-comm-type a2a, which has whole sequences, or drop the mask"
        )
    if isinstance(precision.named, PeerRecipe):
        yield f"{given} is not built for Transformer Engine's attention ({precision.name}): use another precision"


def wire(config: Config, world_size: int) -> Problems:
    """Keys and values travel only between context-parallel processes, in FP8 at a level with FP8, and as FP8 attention reads them."""
    wire, precision = config.parallel.cp_wire, config.precision
    if wire is None:
        return
    fp8 = refusal(precision) is None and precision.named.fp8
    lacking = [] if fp8 or wire == "bf16" else ["--opt-level O1, O2 or O3"]
    lacking += [] if config.parallel.context_parallel_size > 1 else ["--context-parallel-size above 1"]
    if lacking:
        fix = " and ".join(lacking)
        yield f"--cp-wire {wire} has no effect without {fix}: drop it, or add {fix}"
    elif wire == "bf16" and precision.attention_precision == "fp8":
        yield "--cp-wire bf16 does not fit --attention-precision fp8, whose kernels read keys and values in FP8, as they travel: drop one"


RULES: Rules = {
    chunks: ("model", "parallel"),
    heads: ("model", "parallel"),
    wire: ("parallel", "precision"),
    attention: ("model", "parallel", "data", "precision"),
}
