"""The dataclasses: well-formed fields, intervals, and what is derived from the settings."""

import dataclasses
import math
from typing import get_type_hints

import pytest

from megatron.lm import config as settings
from megatron.lm.config import (
    CommunicationConfig,
    Config,
    Interval,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
)

SECTIONS = get_type_hints(Config)
GPT = ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=64)


def make(model: ModelConfig = GPT, training: dict | None = None, **sections) -> Config:
    length = TrainingConfig(**({"micro_batch_size": 2, "train_iters": 10} | (training or {})))
    return Config(model=model, optimizer=OptimizerConfig(lr=1e-3), training=length, **sections)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_fields_carry_help_and_legal_defaults(section):
    hints = get_type_hints(section)
    for setting in dataclasses.fields(section):
        assert setting.metadata["help"], setting.name
        numeric = hints[setting.name] in (int, float, int | None, float | None)
        assert (setting.metadata["legal"] is not None) == numeric, f"{setting.name}: numbers have a legal interval, nothing else has"
        if setting.default in (dataclasses.MISSING, None):
            continue
        if setting.metadata["choices"]:
            defaults = setting.default if isinstance(setting.default, tuple) else (setting.default,)
            assert set(defaults) <= set(setting.metadata["choices"]), setting.name
        if numeric:
            assert setting.default in setting.metadata["legal"], setting.name


def test_flag_names_are_unique_over_the_sections():
    names = [setting.name for section in SECTIONS.values() for setting in dataclasses.fields(section)]
    assert len(names) == len(set(names))


def test_sections_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPT.num_layers = 5  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        OptimizerConfig(1e-3)  # type: ignore[call-arg, misc]


@pytest.mark.parametrize(
    ("interval", "text", "inside", "outside"),
    [
        (settings.COUNT, "[1, inf)", [1, 2.5, 10**12], [0, -1, math.inf, math.nan]),
        (settings.POSITIVE, "(0, inf)", [1e-30], [0, -0.0, math.inf, math.nan]),
        (settings.PROBABILITY, "[0, 1)", [0, 0.999], [1, -1e-9, math.nan]),
        (Interval(0, 1, low_open=True), "(0, 1]", [1], [0, 1.1]),
        (Interval(0, 2**31 - 1), "[0, 2147483647]", [2**31 - 1], [2**31]),
    ],
)
def test_interval(interval, text, inside, outside):
    assert str(interval) == text
    assert all(value in interval for value in inside)
    assert not any(value in interval for value in outside)


def test_derived_shape():
    assert (GPT.ffn_size, GPT.query_groups, GPT.head_size, GPT.max_positions) == (512, 4, 32, 64)
    other = dataclasses.replace(
        GPT, ffn_hidden_size=100, group_query_attention=True, num_query_groups=2, kv_channels=8, max_position_embeddings=256
    )
    assert (other.ffn_size, other.query_groups, other.head_size, other.max_positions) == (100, 2, 8, 256)
    assert dataclasses.replace(GPT, group_query_attention=True).query_groups == 1


@pytest.mark.parametrize(("hidden", "ffn"), [(4096, 10880), (768, 2048), (128, 320), (16, 64)])
def test_swiglu_width_is_megatrons(hidden, ffn):
    assert dataclasses.replace(GPT, hidden_size=hidden, swiglu=True).ffn_size == ffn


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({}, "bf16"),
        ({"bf16": True}, "bf16"),
        ({"opt_level": "O0"}, "bf16"),
        ({"fp16": True}, "fp16-amp"),
        ({"opt_level": "O0", "precision": "bf16", "bf16": True}, "bf16"),
        ({"precision": "fp32"}, "fp32"),
        ({"opt_level": "O2"}, "O2"),
        ({"opt_level": "O3", "precision": "O3"}, "O3"),
    ],
)
def test_recipe_name(flags, name):
    precision = PrecisionConfig(**flags)
    assert precision.name == name
    assert precision.is_fp8 == name.startswith("O")


def test_contradictory_recipes_have_no_name():
    with pytest.raises(ValueError, match=r"--opt-level O2 and --bf16 contradict each other: keep one"):
        _ = PrecisionConfig(opt_level="O2", bf16=True).name


@pytest.mark.parametrize(
    ("flags", "has_fp8_gradients", "accumulated_in"),
    [
        ({}, False, "fp32"),
        ({"precision": "fp32"}, False, "fp32"),
        ({"opt_level": "O1"}, True, "bf16"),
        ({"opt_level": "O2", "grad_format": "fp8-e5m2"}, True, "bf16"),
        ({"opt_level": "O2", "grad_format": "bf16"}, False, "fp32"),
        ({"opt_level": "O3", "grad_accum_dtype": "fp8-sr"}, True, "fp8-sr"),
        ({"precision": "coat"}, False, "bf16"),
        ({"precision": "coat", "grad_format": "fp32"}, False, "fp32"),
        ({"precision": "coat", "grad_format": "fp8-e4m3"}, True, "bf16"),
    ],
)
def test_gradients_of_micro_batches(flags, has_fp8_gradients, accumulated_in):
    precision = PrecisionConfig(**flags)
    assert precision.has_fp8_gradients is has_fp8_gradients
    assert precision.grad_accum == accumulated_in


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


def test_buckets_hold_two_to_the_25_elements_unless_told():
    assert CommunicationConfig().bucket_size == 2**27
    assert CommunicationConfig(ddp_bucket_size=100).bucket_size == 100


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
    assert make().lr_decay_iters == 10
    assert dataclasses.replace(make(), optimizer=OptimizerConfig(lr=1e-3, lr_decay_iters=7)).lr_decay_iters == 7
