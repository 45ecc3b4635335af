"""Batches, schedule and data: what has to be given, and what the rest is without a flag."""

import pytest

from megatron.lm.config import DEFAULT_SPLIT, DataConfig, OptimizerConfig, TrainingConfig


def test_what_no_default_can_know_has_to_be_given():
    with pytest.raises(TypeError, match="micro_batch_size"):
        TrainingConfig(train_iters=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="lr"):
        OptimizerConfig()  # type: ignore[call-arg]


def test_the_optimizer_s_defaults_are_megatron_s():
    optimizer = OptimizerConfig(lr=1.0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_grad, optimizer.lr_decay_style) == (0.01, 1.0, "linear")
    assert DataConfig().split == DEFAULT_SPLIT == "969,30,1"
