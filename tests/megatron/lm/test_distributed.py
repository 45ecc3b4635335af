"""How the flags reach the gradient synchroniser; what it does with gradients is tests/msamp/comm's."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
import torch

from megatron.lm import distributed
from megatron.lm.distributed import build_grad_sync
from megatron.lm.model.gpt import GPT, build_model
from megatron.lm.optim import build_recipe
from msamp.comm.grad_sync import GradSync
from msamp.numerics.formats import BF16, E4M3, E5M2, FP32, Format
from msamp.numerics.tensor import ScalingTensor


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    with tiny.started(tiny.config("corpus")):
        yield


def build(**settings: Any) -> tuple[GPT, GradSync]:
    config = tiny.config("corpus", **settings)
    recipe = build_recipe(config.precision)
    model = build_model(config, recipe, tiny.VOCABULARY)
    return model, build_grad_sync(model, config, recipe)


DEFAULTS = {
    "bucket_elements": 2**27,
    "shard": False,
    "exchange": "fp32-sum",
    "scaling": None,
    "mu_rule": None,
    "accumulate": "bf16",
    "overlap": True,
    "seed": 1234,
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {}),
        ({"grad_exchange": "nccl"}, {"exchange": "nccl", "scaling": "auto", "mu_rule": "halve"}),
        ({"grad_exchange": "nccl", "mu_rule": "paper"}, {"exchange": "nccl", "scaling": "auto", "mu_rule": "paper"}),
        ({"grad_exchange": "nccl", "grad_scaling": "pre"}, {"exchange": "nccl", "scaling": "pre"}),
        ({"grad_exchange": "nccl", "grad_scaling": "post"}, {"exchange": "nccl", "scaling": "post"}),
        ({"ddp_bucket_size": 5000}, {"bucket_elements": 5000}),
        ({"use_distributed_optimizer": True}, {"shard": True}),
        ({"opt_level": "O3"}, {"shard": True}),
        ({"opt_level": "O0"}, {"accumulate": "fp32"}),
        ({"grad_accum_dtype": "fp8-sr"}, {"accumulate": "fp8-sr"}),
        ({"overlap_grad_reduce": False}, {"overlap": False}),
        ({"seed": 7}, {"seed": 7}),
    ],
    ids=str,
)
def test_flags_reach_the_synchroniser(monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], expected: dict[str, Any]):
    spy = Mock(wraps=distributed.grad_sync)
    monkeypatch.setattr(distributed, "grad_sync", spy)
    _, sync = build(**{"opt_level": "O2", **flags})
    options = {**DEFAULTS, **expected}
    assert {key: value for key, value in spy.call_args.kwargs.items() if key in DEFAULTS} == options
    assert (sync.shard, sync.exchange, sync.overlap, sync.seed) == tuple(options[key] for key in ("shard", "exchange", "overlap", "seed"))
    assert (sync.autoscale.rule if sync.autoscale else None) == options["mu_rule"]
    assert all(len(bucket.params) == 1 or sum(bucket.sizes) <= options["bucket_elements"] for bucket in sync.buckets)


@pytest.mark.parametrize(
    ("flags", "linear", "other"),
    [
        ({"precision": "fp32"}, FP32, FP32),
        ({"opt_level": "O0"}, FP32, FP32),
        ({"opt_level": "O1"}, E4M3, BF16),
        ({"opt_level": "O2"}, E4M3, BF16),
        ({"opt_level": "O2", "grad_format": "fp8-e5m2"}, E5M2, BF16),
        ({"opt_level": "O2", "grad_format": "bf16"}, BF16, BF16),
        ({"opt_level": "O3"}, E4M3, BF16),
    ],
    ids=str,
)
def test_formats_of_the_gradients(flags: dict[str, Any], linear: Format, other: Format):
    model, sync = build(**flags)
    for name, p in model.named_parameters():
        matrix = linear if isinstance(p, ScalingTensor) else other
        assert sync.bucket_of(p).format is (matrix if p.dim() > 1 else FP32), name


def test_all_micro_batches_but_the_last_stay_on_the_rank():
    """megatron-core's schedule asks the model for the context in which nothing is sent."""
    model, sync = build(opt_level="O2", ddp_bucket_size=1)
    p = model.decoder.layers[0].mlp.linear_fc1.weight
    with model.config.no_sync_func():
        p.grad = torch.ones_like(p, dtype=torch.bfloat16)
        sync.take(p)
    assert not sync.bucket_of(p).sent
    assert p.grad is None
    sync.finish()
    assert torch.equal(p.main_grad.dequantize(torch.float32), torch.ones(p.shape, device=p.device))
