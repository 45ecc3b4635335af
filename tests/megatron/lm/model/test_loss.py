import math

import pytest
import torch
from megatron.core import parallel_state

from helpers import dist
from megatron.lm.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron.lm.model.gpt import mean_loss, token_loss
from megatron.lm.processes.process_groups import device, initialize


def config(**parallel: int) -> Config:
    return Config(
        model=ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=5),
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=2, train_iters=1),
        parallel=ParallelConfig(**parallel),
    )


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 2, 8, generator=generator)  # [s, b, v]
    return logits.to(device(), dtype), torch.randint(0, 8, (2, 5), generator=generator).to(device())


def reference(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    log_p = logits.double().log_softmax(-1)
    return torch.stack([torch.stack([-log_p[s, b, labels[b, s]] for s in range(5)]) for b in range(2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_loss(one_process: None, dtype: torch.dtype):
    logits, labels = batch(dtype)
    logits.requires_grad_()
    loss = token_loss(logits * 1, labels)  # a copy: FP32 logits are overwritten
    assert loss.shape == (2, 5)
    assert loss.dtype is torch.float32
    expected = reference(logits, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    (mine,), (theirs,) = torch.autograd.grad(loss.square().sum(), logits), torch.autograd.grad(expected.square().sum(), logits)
    torch.testing.assert_close(mine, theirs, rtol=1e-5 if dtype is torch.float32 else 2**-7, atol=1e-5)


def test_the_mean_is_over_counted_tokens_and_its_report_has_no_gradient():
    loss_sum, mask = torch.tensor(4.0, requires_grad=True), torch.tensor([[1.0, 0.0, 1.0]])
    mean, report = mean_loss(loss_sum, mask)
    assert (mean.item(), report) == (2.0, {"loss_sum": 4.0, "tokens": 2.0})
    mean.backward()
    assert loss_sum.grad == 0.5
    assert not report["loss_sum"].requires_grad
    assert mean_loss(torch.zeros(()), torch.zeros(1, 2))[0] == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(bad: float):
    loss_sum = torch.tensor(bad, requires_grad=True)
    mean, report = mean_loss(loss_sum, torch.ones(1, 2))
    mean.backward()
    assert loss_sum.grad is not None
    assert loss_sum.grad.isnan()
    assert repr(report["loss_sum"].item()) == repr(bad)


def split_vocabulary() -> tuple[torch.Tensor, torch.Tensor]:
    initialize(config(tensor_model_parallel_size=2))
    logits, labels = batch()
    part = logits.chunk(2, dim=-1)[parallel_state.get_tensor_model_parallel_rank()].contiguous().requires_grad_()
    loss = token_loss(part * 1, labels)
    (grad,) = torch.autograd.grad(loss.square().sum(), part)
    return loss.detach(), grad


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on one GPU")
def test_split_vocabulary():
    logits, labels = batch()
    logits.requires_grad_()
    expected = reference(logits, labels)
    (grad,) = torch.autograd.grad(expected.square().sum(), logits)
    ranks = dist.run(split_vocabulary, 2)
    for loss, _ in ranks:
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat([part for _, part in ranks], dim=-1), grad, rtol=1e-5, atol=1e-5)
