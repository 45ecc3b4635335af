"""The dry run's arithmetic: against built models on one process and on grids, and by hand; test_check_plan.py has measured peaks."""

import dataclasses
from typing import Any

import pytest

from helpers import dist, tiny
from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import parameter_count
from megatron.lm.planning.fits import report
from megatron.lm.planning.layers import stage_parameters
from megatron.lm.planning.memory import Rank, layer_activations, plan, slots, stage_activations

STATES = ("weight", "master", "grad", "m", "v")
LLAMA = {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True}
EXPERTS: dict[str, Any] = LLAMA | {"num_experts": 4, "moe_ffn_hidden_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "O0 untied": {"opt_level": "O0", "untie_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute"},
    "O3 with BF16 ends": {"opt_level": "O3", "num_layers": 4, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2},
    "O2 modern": LLAMA
    | {"opt_level": "O2", "hidden_size": 64, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2},
    "O3 qwen": LLAMA | {"opt_level": "O3", "untie_embeddings_and_output_weights": True, "qk_layernorm": True},
    "O2 some experts": EXPERTS | {"opt_level": "O2", "num_layers": 4, "moe_layer_freq": "[0,1,1,0]", "first_last_layers_bf16": True},
    "O3 experts": EXPERTS | {"opt_level": "O3", "moe_shared_expert_intermediate_size": 16, "qk_layernorm": True},
    "O3 squared ReLU": {"opt_level": "O3", "squared_relu": True, "position_embedding_type": "none"},
    "O2 formats": {"opt_level": "O2", "master_format": "bf16", "grad_format": "fp32", "exp_avg_sq_format": "fp8-e5m2"},
    "O3": {"opt_level": "O3"},
    "coat": {"precision": "coat"},
    "O2 some BF16": {"opt_level": "O2", "bf16_linears": ["linear_qkv", "linear_fc2"]},
}
TP, SP, PP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
GRIDS: dict[str, dict[str, Any]] = {
    "DP": {"opt_level": "O3", "ddp_bucket_size": 5000},
    "TP SP": {**MODELS["O3"], **TP, **SP},
    "TP modern": {**MODELS["O2 modern"], **TP},
    "TP qwen": {**MODELS["O3 qwen"], **TP},
    "TP some BF16": {**MODELS["O2 some BF16"], "opt_level": "O3", **TP, **SP},
    "PP": {"opt_level": "O3", **PP},
    "PP with BF16 ends": {**MODELS["O3 with BF16 ends"], **PP},
    "PP untied": {**MODELS["O0 untied"], **PP},
}


def flags(text: str) -> Config:
    return parse_args(text.split())


def built(settings: Config) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    """Shapes of the parameters of this rank, and the bytes of its model states."""
    from megatron.lm.build import build_training
    from megatron.lm.training.optimizer import bytes_per_parameter

    with tiny.started(settings):
        training = build_training(settings, tiny.VOCABULARY)
        shapes = [tuple(p.shape) for p in training.model.parameters()]
        count = sum(p.numel() for p in training.model.parameters())
        return shapes, {key: size * count for key, size in bytes_per_parameter(training.optimizer).items()}


def built_all(settings: list[Config]) -> list[tuple[list[tuple[int, ...]], dict[str, float]]]:
    return [built(one) for one in settings]


def planned(rank: Rank) -> list[float]:
    sizes = {"weight": rank.weight, "grad": rank.gradient, **rank.states}
    return [sizes[key] for key in STATES]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_states_are_those_of_the_built_model(name):
    settings = tiny.config("unread", **MODELS[name])
    shapes, states = built(settings)
    assert [p.shape for p in stage_parameters(settings, 0)] == shapes
    (rank,) = plan(settings, 1)
    assert planned(rank) == pytest.approx([states[key] for key in STATES])


@pytest.mark.nightly
def test_parameters_and_states_are_those_of_every_rank_of_a_grid():
    settings = [tiny.config("unread", **grid) for grid in GRIDS.values()]
    found = dist.run(built_all, 2, settings)
    for i, (name, config) in enumerate(zip(GRIDS, settings, strict=True)):
        ranks = plan(config, 2)
        for number in (0, 1):
            shapes, states = found[number][i]
            rank = ranks[number if len(ranks) == 2 else 0]  # tensor-parallel peers are alike
            assert [p.shape for p in stage_parameters(config, rank.stage)] == shapes, name
            assert planned(rank) == pytest.approx([states[key] for key in STATES]), name


def per_element(text: str) -> float:
    """Bytes a layer saves, in units of sequence x micro-batch x hidden size."""
    config = flags(f"--preset 1.3b {text}")
    return layer_activations(config) / (config.model.seq_length * config.training.micro_batch_size * config.model.hidden_size)


SCALES = 4 / 128  # bytes per element of a cast by blocks of 128


def test_activations_of_a_layer():
    assert per_element("--opt-level O0") == 32
    assert per_element("--precision fp32") == 2 * 32
    assert per_element("--opt-level O0 --swiglu --ffn-hidden-size 4096") == 28
    grouped = "--group-query-attention --num-query-groups 4"
    assert per_element(f"--opt-level O0 {grouped}") == 32 - 2 * 2 * 3 / 4 + 2  # narrower keys and values; queries are copied
    one_each = f"{grouped} --tensor-model-parallel-size 4 --sequence-parallel"
    assert per_element(f"--opt-level O0 {one_each}") == 8 - 2 * 2 * 3 / 4 / 4  # a rank's one group has nothing to copy
    assert per_element(f"--opt-level O3 {one_each}") == 5 - 2 * 2 * 3 / 4 / 4
    tp = "--tensor-model-parallel-size 2"
    assert per_element(f"--opt-level O0 {tp} --sequence-parallel") == 16
    assert per_element(f"--opt-level O3 {tp} --sequence-parallel") == 10
    assert per_element(f"--opt-level O3 {tp} --sequence-parallel --tp-saved-input gathered") == 12
    assert per_element(f"--opt-level O2 {tp} --sequence-parallel") == 10
    assert per_element(f"--opt-level O2 {tp} --sequence-parallel --fp8-recipe blockwise") == 14.5 + 4.5 * SCALES  # gathered in BF16
    assert per_element(f"--opt-level O3 {tp}") == 12  # the residual stream on every rank
    assert per_element(f"--opt-level O2 {tp} --fp8-recipe blockwise") == 13.5 + 2 + 1 + 4.5 * SCALES  # and its casts
    assert per_element("--opt-level O0 --position-embedding-type learned_absolute") == 32
    assert per_element("--opt-level O0 --hidden-dropout 0.1") == 34


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_fused_layer_keeps_what_cannot_be_made_again(level: str):
    assert per_element(f"--opt-level {level}") == 20
    assert per_element(f"--opt-level {level} --swiglu --ffn-hidden-size 4096") == 20
    assert per_element(f"--opt-level {level} --squared-relu --disable-bias-linear --add-qkv-bias") == 20
    selective = f"--opt-level {level} --recompute-granularity selective"
    assert per_element(selective) == per_element(f"{selective} --recompute-modules core_attn") == 18
    assert per_element(f"{selective} --recompute-modules core_attn mlp") == 10
    assert per_element(f"{selective} --attention-dropout 0.1") == 20  # what dropped out cannot be made again
    grouped = "--group-query-attention --num-query-groups 4"
    assert per_element(f"--opt-level {level} {grouped}") == 20 - 2 * 2 * 3 / 4 + 2  # narrower keys and values; queries are copied


# Of the LM head's input and weight: the gradients in FP32, and in BF16 for backward. A chunk of logits, in forward, is less.
HEAD = (4 + 2) * (2048 * 4 + 50304) * 2048


def test_the_head_holds_its_gradients_and_a_chunk_of_logits():
    def head(text: str) -> int:
        config = flags(f"--opt-level O3 {text}")
        model = config.model
        stream = 2 * 2048 * config.training.micro_batch_size * model.hidden_size
        return stage_activations(config, 0, 1) - layer_activations(config) * model.num_layers - 2 * stream

    assert head("--preset 1.3b") == HEAD
    # With tensor parallelism half of a vocabulary that is padded to a multiple of 256; two chunks of logits.
    assert head("--preset 1.3b --tensor-model-parallel-size 2") == 4 * (8192 + 25216) * 2048 + 2 * 4096 * 25216
    # A narrow model: the chunk of logits, of 2,048 tokens, is larger than the gradients in BF16.
    assert head("--preset 125m --micro-batch-size 1") == 4 * (2048 + 50304) * 768 + 2 * 2048 * 50304


def test_with_a_large_micro_batch_backward_of_a_layer_is_more_than_the_head():
    def beside(text: str) -> int:
        config = flags(f"--preset 1.3b --micro-batch-size 64 {text}")
        return stage_activations(config, 0, 1) - layer_activations(config) * 24

    unit = 2048 * 64 * 2048
    assert beside("--opt-level O3") == (6 + 5 * 4) * unit
    assert beside("--opt-level O3 --save-activations coat") == (6 + 7 * 4) * unit
    assert beside("--opt-level O3 --swiglu --ffn-hidden-size 4096") == (6 + 7 * 2) * unit
    assert beside("--opt-level O0") == 4 * unit + (4 + 2) * (2048 * 64 + 50304) * 2048  # not fused: the head


def test_micro_batches_under_way_on_the_stages_of_a_pipeline():
    config = flags("--preset 1.3b --opt-level O3 --pipeline-model-parallel-size 4 --cuda-graph none")
    layer, stream = layer_activations(config), 2 * 2048 * 4 * 2048
    head = 2 * stream + HEAD
    assert [stage_activations(config, stage, 8) for stage in range(4)] == [24 * layer, 18 * layer, 12 * layer, 6 * layer + head]
    assert stage_activations(config, 0, 2) == 12 * layer
    interleaved = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, num_layers_per_virtual_pipeline_stage=3))
    assert [stage_activations(interleaved, stage, 8) for stage in range(3)] == [33 * layer, 27 * layer, 21 * layer]
    assert stage_activations(interleaved, 3, 8) == 15 * layer + head


def test_in_graphs_each_micro_batch_under_way_has_memory_of_its_own():
    config = flags("--preset 1.3b --opt-level O3 --pipeline-model-parallel-size 4")
    layer, stream = layer_activations(config), 2 * 2048 * 4 * 2048
    head, beside = (
        2 * stream + HEAD,
        (2 * 2 + 2) * stream // 2 + (2 + 2 + 1) * 4 * stream // 2,
    )  # of a layer's backward, and `HEAD` above it
    each = 6 * layer + 2 * stream
    assert [stage_activations(config, stage, 8) for stage in range(4)] == [
        *(count * (each + beside) + 2 * stream for count in (4, 3, 2)),
        each + max(head, beside) + 2 * stream,
    ]
    eager = dataclasses.replace(config, training=dataclasses.replace(config.training, cuda_graph="none"))
    more = max(rank.total for rank in plan(config, 4)) - max(rank.total for rank in plan(eager, 4))
    assert f"add --cuda-graph none to save the {more / 2**30:.2f} GiB" in report(config, 4)
    assert "--cuda-graph" not in report(eager, 4)
    interleaved = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, num_layers_per_virtual_pipeline_stage=3))
    chunks = slots(0, 4, 2, 8)
    assert stage_activations(interleaved, 0, 8) == sum(count * (3 * layer + 2 * stream + beside) + 2 * stream for count in chunks)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 3), (7, 5)])
def test_a_huge_batch_is_planned_like_a_long_one(stages: int, chunks: int):
    """Millions of micro-batches were walked through one by one, for every grid."""
    for stage in range(stages):
        assert slots(stage, stages, chunks, stages * 10**9) == slots(stage, stages, chunks, stages * 20)


def test_full_recomputation_keeps_the_inputs_of_its_units():
    config = flags("--preset 1.3b --opt-level O3 --recompute-granularity full --recompute-method uniform --recompute-num-layers 5")
    layer, stream = layer_activations(config), 2 * 2048 * 4 * 2048
    head = 2 * stream + HEAD
    assert stage_activations(config, 0, 1) == 5 * stream + 5 * layer + head
    blocks = dataclasses.replace(config, training=dataclasses.replace(config.training, recompute_method="block"))
    assert stage_activations(blocks, 0, 1) == 5 * stream + 19 * layer + layer + head


def test_several_micro_batches_are_summed_in_the_accumulators_format():
    def accumulated(text: str, world_size: int = 1) -> int:
        config = flags(f"--preset 125m --global-batch-size {16 * world_size} {text}")
        return plan(config, world_size)[0].accumulated

    count = parameter_count(flags("--preset 125m").model, 50304)
    small = sum(p.size for p in stage_parameters(flags("--preset 125m"), 0) if p.kind == "vector")
    assert accumulated("--opt-level O0") == 4 * count
    assert accumulated("--opt-level O3", 2) == 2 * (count - small) + 4 * small
    assert accumulated("--opt-level O3 --grad-accum-dtype fp8") == count - small + 4 * small + 50304 * 768
    assert accumulated("--opt-level O3 --micro-batch-size 16") == 0
    assert accumulated("--opt-level O3 --grad-accum-on owner") == 4 * count
    shares = [rank.accumulated for rank in plan(flags("--preset 125m --opt-level O3 --grad-accum-on owner --global-batch-size 128"), 4)]
    assert sum(shares) == 4 * count  # spread over the ranks
    assert max(shares) < 1.1 * count


def test_with_the_mask_of_documents_keys_of_groups_are_repeated():
    grouped = "--opt-level O3 --group-query-attention --num-query-groups 4"
    assert per_element(f"{grouped} --reset-attention-mask") == per_element(grouped) + 4
    assert per_element("--opt-level O3 --reset-attention-mask") == per_element("--opt-level O3")
