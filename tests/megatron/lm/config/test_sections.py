"""Declaration of settings, and quantities that follow from settings of one section or of several."""

import dataclasses
import math
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from megatron.core import num_microbatches_calculator
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.lm.config import (
    CheckpointConfig,
    CommunicationConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    Range,
    TrainingConfig,
)
from megatron.lm.config.sections import baselines, schema
from megatron.lm.config.sections.batch_sizes import BatchSizes, Ramp
from megatron.lm.config.sections.model import layer_pattern
from megatron.lm.config.sections.parallel import AXES, ProcessAxes
from megatron.lm.config.sections.precision import recipe_names
from megatron.lm.config.sections.schema import choices_of
from megatron.lm.config.whole import ScheduleSteps
from msamp.numerics import recipe
from msamp.numerics.recipe import BF16

SECTIONS = get_type_hints(Config)
GPT = ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=64)


def make(model: ModelConfig = GPT, training: dict[str, Any] | None = None, **sections: Any) -> Config:
    length = TrainingConfig(**({"micro_batch_size": 2, "train_iters": 10} | (training or {})))
    return Config(model=model, optimizer=OptimizerConfig(lr=1e-3), training=length, **sections)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_fields_have_help_and_legal_defaults(section):
    hints = get_type_hints(section)
    for setting in dataclasses.fields(section):
        assert setting.metadata["help"], setting.name
        numeric = hints[setting.name] in (int, float, int | None, float | None, tuple[int, ...])
        assert (setting.metadata["legal"] is not None) == numeric, f"{setting.name}: numbers have a legal interval, nothing else has"
        if setting.default in (dataclasses.MISSING, None, ()):
            continue
        values = setting.default if isinstance(setting.default, tuple) else (setting.default,)
        assert set(values) <= set(choices_of(setting) or values), setting.name
        assert not numeric or all(value in setting.metadata["legal"] for value in values), setting.name


@pytest.mark.parametrize(
    ("interval", "text", "inside", "outside"),
    [
        (schema.COUNT, "[1, 2147483647]", [1, 2.5, 2**31 - 1], [0, -1, 2**31, math.inf, math.nan]),
        (schema.POSITIVE, "(0, 1e+30]", [1e-30], [0, -0.0, 1e38, math.inf, math.nan]),
        (schema.PROBABILITY, "[0, 1)", [0, 0.999], [1, -1e-9, math.nan]),
        (Range(0, 1, low_open=True), "(0, 1]", [1], [0, 1.1]),
    ],
)
def test_interval(interval, text, inside, outside):
    assert str(interval) == text
    assert all(value in interval for value in inside)
    assert not any(value in interval for value in outside)


def test_derived_shape():
    assert (GPT.ffn_size, GPT.query_groups, GPT.head_size, GPT.max_positions) == (512, 4, 32, 64)
    other = replace(GPT, ffn_hidden_size=100, group_query_attention=True, num_query_groups=2, kv_channels=8, max_position_embeddings=256)
    assert (other.ffn_size, other.query_groups, other.head_size, other.max_positions) == (100, 2, 8, 256)
    assert replace(GPT, group_query_attention=True).query_groups == 1
    assert [replace(GPT, hidden_size=hidden, swiglu=True).ffn_size for hidden in (4096, 768, 128, 16)] == [10880, 2048, 320, 64]


@pytest.mark.parametrize(
    ("text", "layers", "wanted"), [("1", 3, "111"), ("2", 5, "10101"), ("([0]*1+[1]*3)", 4, "0111"), ("2*[0, 1]", 4, "0101")]
)
def test_layers_with_experts_are_those_of_megatron_lms_expression(text: str, layers: int, wanted: str):
    assert "".join(str(int(one)) for one in layer_pattern(text, layers)) == wanted


RAMPS = [Ramp(2, 2, 100), Ramp(8, 4, 33), Ramp(2, 7, 1), Ramp(4, 1, 1000)]


@pytest.mark.skipif(
    not hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator"), reason="megatron-core 0.18 removed it"
)
@pytest.mark.parametrize("ramp", RAMPS)
def test_each_iteration_has_the_size_of_megatron_core_s_calculator(ramp: Ramp):
    final = ramp.start + 6 * ramp.increment
    sizes = BatchSizes(final, ramp)
    calculator = num_microbatches_calculator.RampupBatchsizeNumMicroBatchesCalculator(
        final, 1, 1, False, 1, ramp.start, ramp.increment, ramp.samples
    )
    consumed = 0
    for iteration in range(300):
        calculator.update(consumed, consistency_check=True)
        assert sizes.consumed(iteration) == consumed
        assert sizes.at(consumed) == calculator.get_current_global_batch_size()
        consumed += sizes.at(consumed)
    assert sizes.at(consumed) == final


@pytest.mark.parametrize("ramp", [None, *RAMPS])
def test_iterations_of_a_number_of_samples_are_megatron_lm_s(ramp: Ramp | None):
    """Megatron-LM steps through the ramp while neither it nor the samples are over, and leaves out a last batch that is not full."""
    sizes = BatchSizes(26 if ramp is None else ramp.start + 6 * ramp.increment, ramp)
    for samples in range(1, 2500, 13):
        consumed, iterations = 0, 0
        while ramp is not None and consumed <= ramp.samples and consumed <= samples:
            consumed += sizes.at(consumed)
            iterations += 1
        iterations += max(0, samples - consumed) // sizes.final
        assert sizes.iterations(samples) == iterations


def test_a_ramp_of_a_trillion_samples_is_counted_at_once():
    sizes = BatchSizes(4, Ramp(1, 1, 10**12))
    assert (sizes.consumed(10**9), sizes.iterations(10**9)) == (10**9, 10**9 + 1)
    assert sizes.at(sizes.consumed(sizes.iterations(10**13))) == 4


@pytest.mark.parametrize(
    ("flags", "scaling", "rule"),
    [
        ({}, None, None),
        ({"grad_exchange": "nccl"}, "auto", "halve"),
        ({"grad_exchange": "nccl", "mu_rule": "paper"}, "auto", "paper"),
        ({"grad_exchange": "nccl", "grad_scaling": "pre"}, "pre", None),
    ],
)
def test_only_the_sum_of_nccl_has_a_mu(flags, scaling, rule):
    communication = CommunicationConfig(**flags)
    assert (communication.gradient_scaling, communication.mu_adaptation) == (scaling, rule)


def test_axes_follow_from_the_settings_and_the_number_of_processes():
    dense = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    assert dense.axes(64) == ProcessAxes(tensor=2, context=1, data=8, pipeline=4, expert=1, expert_tensor=2, expert_data=8)
    assert (dense.unit, dense.axes(64).model, dense.axes(64).copies) == (8, 8, 8)
    assert str(dense.axes(64)) == "TP 2 x PP 4 x DP 8"
    assert dense.given == {AXES["tensor"]: 2, AXES["pipeline"]: 4}
    long = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=4)
    assert (long.unit, long.axes(64).data, long.axes(64).copies) == (8, 8, 32)
    moe = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=8, expert_tensor_parallel_size=1)
    assert (moe.unit, moe.axes(64).data, moe.axes(64).expert_data, moe.axes(64).splits_experts) == (8, 32, 8, True)
    assert str(moe.axes(64)) == "TP 2 x PP 1 x DP 32, experts: TP 1 x EP 8 x DP 8"
    assert moe.given == {AXES["tensor"]: 2, AXES["pipeline"]: 1, AXES["expert"]: 8, AXES["expert tensor"]: 1}


@pytest.mark.parametrize(
    ("settings", "resumes"),
    [
        ({"save": "a"}, False),
        ({"save": "a", "load": "b"}, False),
        ({"save": "a", "load": "b/../a/"}, True),
        ({"save": "a", "load": "a", "finetune": True}, False),
    ],
)
def test_a_run_resumes_itself_if_it_loads_what_it_saves(settings, resumes):
    assert CheckpointConfig(**settings).resumes_itself is resumes


def test_recipes_of_transformer_engine_are_o0_but_for_the_layers():
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert tuple(baselines.BASELINES) == ("te-bf16", "te-delayed", "te-current", "te-block")
    for name in baselines.BASELINES:
        found = PrecisionConfig(precision=name).recipe
        assert isinstance(found, baselines.PeerRecipe)
        assert dict(found.core).keys() <= known
        assert found.keeps_history == (dict(found.core).get("fp8_recipe") == "delayed")
        kept = ("compute", "gemm", "weight", "states", "vectors", "fp8_wire", "shards_optimizer", "accumulator", "activations")
        assert all(getattr(found, fact) == getattr(BF16, fact) for fact in kept)
        assert hash(found)  # it is the key of caches
    assert set(baselines.BASELINES) <= set(recipe_names())
    assert not set(baselines.BASELINES) & set(recipe.names())


@pytest.mark.parametrize(
    ("level", "asked", "shards"), [("O0", False, False), ("O0", True, True), ("O2", False, False), ("O2", True, True), ("O3", False, True)]
)
def test_o3_always_shards_the_optimizer(level, asked, shards):
    config = make(precision=PrecisionConfig(opt_level=level), parallel=ParallelConfig(use_distributed_optimizer=asked))
    assert config.shards_optimizer is shards


def test_batches_follow_the_world_size():
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    config = make(training={"global_batch_size": 48}, parallel=parallel)
    assert (config.data_parallel_size(16), config.global_batch_size(16), config.num_micro_batches(16)) == (4, 48, 6)
    assert (make().global_batch_size(3), make().num_micro_batches(3)) == (6, 1)


def test_lengths_in_iterations_and_samples():
    assert make().schedule_steps == ScheduleSteps(in_samples=False, warmup=0, decay=10, wsd=None)
    assert replace(make(), optimizer=OptimizerConfig(lr=1e-3, lr_decay_iters=7)).schedule_steps.decay == 7
    counted = make(training={"train_iters": None, "train_samples": 101, "global_batch_size": 8})
    assert (counted.iterations(2), counted.samples_read(2)) == (12, 96)
    assert counted.schedule_steps == ScheduleSteps(in_samples=True, warmup=0, decay=101, wsd=None)
    shared = OptimizerConfig(lr=1e-3, lr_decay_samples=80, lr_warmup_fraction=0.25, lr_wsd_decay_samples=16)
    assert replace(counted, optimizer=shared).schedule_steps == ScheduleSteps(in_samples=True, warmup=20.0, decay=80, wsd=16)
    ramp = make(training={"train_iters": None, "train_samples": 100, "global_batch_size": 8, "rampup_batch_size": (4, 2, 20)})
    assert [ramp.global_batch_size(1, consumed) for consumed in (0, 4, 8, 12, 18, 24)] == [4, 4, 4, 6, 6, 8]
    assert [ramp.num_micro_batches(1, consumed) for consumed in (0, 12, 24)] == [2, 3, 4]
    assert (ramp.global_batch_size(1), ramp.num_micro_batches(1)) == (8, 4)


@pytest.mark.parametrize("name", ["bf16", "O1", "O3", "coat", "collage-plus"])
def test_layers_are_fused_where_all_of_a_layer_is_fp8(name):
    precision = PrecisionConfig(precision=name)
    fused = make(precision=precision)
    assert fused.fuses_layers is recipe.by_name(name).fp8
    if recipe.by_name(name).fp8:
        assert not make(precision=replace(precision, fp8_recipe="blockwise")).fuses_layers
    assert not make(precision=replace(precision, bf16_linears=("linear_qkv",))).fuses_layers
    split = make(precision=precision, parallel=ParallelConfig(tensor_model_parallel_size=2))
    assert split.fuses_layers is recipe.by_name(name).gathers_fp8
    assert not replace(fused, model=replace(GPT, hidden_dropout=0.1)).fuses_layers
    assert replace(fused, model=replace(GPT, qk_layernorm=True)).fuses_layers is fused.fuses_layers
    assert not replace(fused, model=replace(GPT, qk_layernorm=True, qk_layernorm_scope="projection")).fuses_layers
