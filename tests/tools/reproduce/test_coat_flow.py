"""COAT's flow, emulated: what is rounded where, and that the gradient passes."""

import pytest
import torch

from helpers.numerics import make
from msamp.numerics.formats import E4M3, E5M2
from tools.reproduce import coat_flow
from tools.reproduce.coat_flow import FLOWS, Flow, Llama, bf16, by_tensor, in_groups
from tools.reproduce.trainings import Loop

LOOP = Loop(width=32, layers=2, length=16, batch=4, steps=20, warm_up=2)


def test_roundings_have_one_scale_per_tensor_or_per_16_channels():
    x = make("normal", (4, 32), 0)
    x[:, 16:] *= 1e-6
    assert in_groups(x)[:, 16:].ne(0).all()
    assert by_tensor(E4M3)(x)[:, 16:].eq(0).all()
    for rounded, bits in ((in_groups(x), 4), (by_tensor(E5M2)(x[:, :16]), 3), (bf16(x), 8)):
        error = (rounded - x[:, : rounded.shape[1]]).abs() / x[:, : rounded.shape[1]].abs()
        assert 0 < error.median() < 2.0**-bits
    assert in_groups(in_groups(x)).equal(in_groups(x))


def layer_outputs(flow: Flow) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of a model, and the gradient of the first linear weight."""
    torch.manual_seed(0)
    model = Llama(LOOP, flow)
    scores = model(torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1)))
    scores.square().mean().backward()
    grad = model.linear["qkv_0"].grad
    assert grad is not None
    return scores.detach(), grad


def test_each_flow_rounds_more_than_the_one_before_it():
    plain, plain_grad = layer_outputs(FLOWS["bf16"])
    errors = []
    for name in ("FP8 GEMMs", "FP8 flow, residual stream in BF16", "FP8 flow"):
        scores, grad = layer_outputs(FLOWS[name])
        errors.append(float((scores - plain).norm() / plain.norm()))
        assert 0 < (grad - plain_grad).norm() / plain_grad.norm() < 0.5
    assert 1e-3 < errors[0] < errors[1] < errors[2] < 0.3


@pytest.mark.parametrize("name", ["bf16", "FP8 flow"])
def test_a_training_lowers_the_loss_and_repeats(name):
    text = torch.frombuffer(bytearray(b"the quick brown fox jumps over the lazy dog. " * 60), dtype=torch.uint8)
    first, second = (list(coat_flow.train(FLOWS[name], LOOP, text, seed=3)) for _ in range(2))
    assert first == second
    assert [step for step, _ in first] == [10, 20, 20]
    assert first[1][1] < first[0][1] < 5.7
