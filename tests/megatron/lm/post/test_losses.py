"""The losses against loops and formulas."""

import math

import pytest
import torch

from megatron.lm.post.losses import answer_loss, dpo_loss, masked_mean, policy_loss, token_log_probs, value_loss


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(0)


def test_the_answer_loss_is_that_of_a_loop(draw):
    logits, tokens = torch.randn(3, 7, 11, generator=draw), torch.randint(11, (3, 7), generator=draw)
    answer = torch.rand(3, 7, generator=draw) < 0.5
    want = 0.0
    for row in range(3):
        for place in range(1, 7):
            if answer[row, place]:
                want -= torch.log_softmax(logits[row, place - 1].double(), -1)[tokens[row, place]].item()
    assert answer_loss(logits, tokens, answer).item() == pytest.approx(want, rel=1e-6)


def test_no_gradient_comes_from_a_question(draw):
    logits = torch.randn(1, 6, 5, generator=draw, requires_grad=True)
    answer = torch.tensor([[False, False, False, True, True, False]])
    answer_loss(logits, torch.randint(5, (1, 6), generator=draw), answer).backward()
    assert logits.grad.abs().sum(-1)[0].bool().tolist() == [False, False, True, True, False, False]
    assert answer_loss(logits, torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 6, dtype=torch.bool)).item() == 0


def test_log_probs_are_those_of_the_softmax_at_its_temperature(draw):
    logits, tokens = torch.randn(2, 3, 5, generator=draw), torch.randint(5, (2, 3), generator=draw)
    for temperature in (1.0, 0.5):
        want = torch.log_softmax(logits / temperature, -1).gather(-1, tokens[..., None])[..., 0]
        assert torch.allclose(token_log_probs(logits, tokens, temperature), want)
    assert token_log_probs(logits.bfloat16(), tokens).dtype == torch.float32


def test_dpo_is_its_formula():
    chosen, rejected = torch.tensor([-4.0, -9.0]), torch.tensor([-6.0, -7.0])
    reference = torch.tensor([-5.0, -8.5]), torch.tensor([-5.5, -8.0])
    loss, margin = dpo_loss(chosen, rejected, *reference, beta=0.1)
    want = [0.1 * ((-4 + 5) - (-6 + 5.5)), 0.1 * ((-9 + 8.5) - (-7 + 8))]
    assert margin.tolist() == pytest.approx(want)
    assert loss.tolist() == pytest.approx([-math.log(1 / (1 + math.exp(-x))) for x in want])


def test_a_policy_that_is_its_reference_loses_log_two():
    x = torch.tensor([-4.0])
    assert dpo_loss(x, 2 * x, x, 2 * x, beta=0.5)[0].item() == pytest.approx(math.log(2))


def test_the_clipped_surrogate_by_hand():
    ratio = torch.tensor([[1.1, 1.5, 0.5, 1.5, 9.0]])
    gain = torch.tensor([[2.0, 1.0, -1.0, -1.0, 5.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    loss, clipped = policy_loss(ratio.log(), torch.zeros(1, 5), gain, mask, clip=0.2)
    # ratio x advantage, but 1.2 where a rise past 1.2 would gain, and 0.8 where a fall below 0.8 would
    assert loss.item() == pytest.approx(-(1.1 * 2 + 1.2 - 0.8 - 1.5) / 4)
    assert clipped.item() == pytest.approx(2 / 4)


def test_a_ratio_of_masked_tokens_has_no_gradient_and_is_no_infinity():
    log_probs = torch.tensor([[0.0, 1e4]], requires_grad=True)
    loss, _ = policy_loss(log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[True, False]]), clip=0.2)
    loss.backward()
    assert log_probs.grad.tolist() == [[-1.0, 0.0]]


def test_the_value_loss_by_hand():
    values, before = torch.tensor([[1.0, 3.0, 7.0]]), torch.tensor([[0.9, 1.0, 7.0]])
    returns, mask = torch.tensor([[2.0, 2.0, 0.0]]), torch.tensor([[True, True, False]])
    # the second is held at 1 + 0.5, whose error is smaller than its own
    assert value_loss(values, before, returns, mask, clip=0.5).item() == pytest.approx(0.5 * (1 + 1) / 2)
    assert value_loss(values, before, torch.tensor([[2.0, 4.0, 0.0]]), mask, clip=0.5).item() == pytest.approx(0.5 * (1 + 2.5**2) / 2)


def test_a_mean_of_nothing_is_zero():
    x = torch.tensor([1.0, math.nan, 3.0])
    assert masked_mean(x, torch.tensor([True, False, True])).item() == 2
    assert masked_mean(x, torch.zeros(3, dtype=torch.bool)).item() == 0
