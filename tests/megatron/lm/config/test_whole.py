"""What follows from settings of several sections."""

import dataclasses

import pytest

from megatron.lm.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from megatron.lm.config.whole import ScheduleSteps
from msamp.numerics import recipe

GPT = ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=64)


def make(model: ModelConfig = GPT, training: dict | None = None, **sections) -> Config:
    length = TrainingConfig(**({"micro_batch_size": 2, "train_iters": 10} | (training or {})))
    return Config(model=model, optimizer=OptimizerConfig(lr=1e-3), training=length, **sections)


@pytest.mark.parametrize(
    ("level", "asked", "shards"), [("O0", False, False), ("O0", True, True), ("O2", False, False), ("O2", True, True), ("O3", False, True)]
)
def test_O3_always_shards_the_optimizer(level, asked, shards):
    config = make(precision=PrecisionConfig(opt_level=level), parallel=ParallelConfig(use_distributed_optimizer=asked))
    assert config.shards_optimizer is shards


def test_vocabulary_is_padded_for_the_tensor_parallel_size():
    assert make().padded_vocab_size(50257) == 50304
    assert make().padded_vocab_size(4096) == 4096
    assert make(parallel=ParallelConfig(tensor_model_parallel_size=8)).padded_vocab_size(50257) == 51200


def test_batches_follow_the_world_size():
    config = make(
        training={"global_batch_size": 48},
        parallel=ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    )
    assert config.data_parallel_size(16) == 4
    assert config.global_batch_size(16) == 48
    assert config.num_micro_batches(16) == 6
    assert make().global_batch_size(3) == 6
    assert make().num_micro_batches(3) == 1


def test_decay_ends_with_the_training_unless_told():
    assert make().schedule_steps == ScheduleSteps(in_samples=False, warmup=0, decay=10, wsd=None)
    assert dataclasses.replace(make(), optimizer=OptimizerConfig(lr=1e-3, lr_decay_iters=7)).schedule_steps.decay == 7


def test_lengths_in_samples():
    counted = make(training={"train_iters": None, "train_samples": 101, "global_batch_size": 8})
    assert (counted.iterations(2), counted.samples_read(2)) == (12, 96)
    steps = ScheduleSteps(in_samples=True, warmup=0, decay=101, wsd=None)
    assert counted.schedule_steps == steps
    shared = OptimizerConfig(lr=1e-3, lr_decay_samples=80, lr_warmup_fraction=0.25, lr_wsd_decay_samples=16)
    steps = ScheduleSteps(in_samples=True, warmup=20.0, decay=80, wsd=16)
    assert dataclasses.replace(counted, optimizer=shared).schedule_steps == steps
    ramp = make(training={"train_iters": None, "train_samples": 100, "global_batch_size": 8, "rampup_batch_size": (4, 2, 20)})
    assert [ramp.global_batch_size(1, consumed) for consumed in (0, 4, 8, 12, 18, 24)] == [4, 4, 4, 6, 6, 8]
    assert [ramp.num_micro_batches(1, consumed) for consumed in (0, 12, 24)] == [2, 3, 4]
    assert (ramp.global_batch_size(1), ramp.num_micro_batches(1)) == (8, 4)


@pytest.mark.parametrize("name", recipe.names())
def test_layers_are_fused_where_all_of_a_layer_is_fp8(name):
    fused = make(precision=PrecisionConfig(precision=name))
    assert fused.fuses_layers is recipe.by_name(name).fp8
    if recipe.by_name(name).fp8:
        assert not make(precision=PrecisionConfig(precision=name, fp8_recipe="blockwise")).fuses_layers
    assert not make(precision=PrecisionConfig(precision=name, bf16_linears=("linear_qkv",))).fuses_layers
    split = make(precision=PrecisionConfig(precision=name), parallel=ParallelConfig(tensor_model_parallel_size=2))
    assert split.fuses_layers is recipe.by_name(name).gathers_fp8
    assert not dataclasses.replace(fused, model=dataclasses.replace(GPT, hidden_dropout=0.1)).fuses_layers
    assert dataclasses.replace(fused, model=dataclasses.replace(GPT, qk_layernorm=True)).fuses_layers is fused.fuses_layers
    whole = dataclasses.replace(GPT, qk_layernorm=True, qk_layernorm_scope="projection")
    assert not dataclasses.replace(fused, model=whole).fuses_layers
