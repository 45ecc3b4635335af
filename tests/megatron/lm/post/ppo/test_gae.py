"""Advantages against a case by hand and a sum by definition; whitening; the coefficient of the divergence."""

import pytest
import torch

from megatron.lm.post.ppo.gae import KLControl, advantages, whitened


def test_a_case_by_hand():
    # gamma 1/2, lam 1/2. Row 1: d = (1 + 2/2 - 4, 2 + 0/2 - 2) = (-2, 0) with values 4, 2 behind which all is 0.
    rewards = torch.tensor([[1.0, 2.0, 9.0], [0.0, 0.0, 8.0]])
    values = torch.tensor([[4.0, 2.0, 7.0], [2.0, 4.0, 4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    gains, returns = advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    # Row 2: d = (0 + 2 - 2, 0 + 2 - 4, 8 - 4) = (0, -2, 4); A = (0 + (-1) / 4, -2 + 4 / 4, 4)
    assert gains.tolist() == [[-2.0, 0.0, 0.0], [-0.25, -1.0, 4.0]]
    assert returns.tolist() == [[2.0, 2.0, 0.0], [1.75, 3.0, 8.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.0), (0.99, 1.0)])
def test_it_is_the_discounted_sum_of_its_definition(gamma, lam):
    draw = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 6, generator=draw) for _ in range(2))
    lengths = [6, 3, 1]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    gains, returns = advantages(rewards, values, mask, gamma, lam)
    for row, length in enumerate(lengths):
        value = [*values[row, :length].tolist(), 0.0]
        deltas = [rewards[row, t].item() + gamma * value[t + 1] - value[t] for t in range(length)]
        want = [sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, length)) for t in range(length)]
        assert gains[row, :length].tolist() == pytest.approx(want, abs=1e-5)
        assert not gains[row, length:].any()
    if lam == 1.0:  # then returns are the discounted rewards, whatever the values
        assert returns[0, 4].item() == pytest.approx(rewards[0, 4].item() + gamma * rewards[0, 5].item(), abs=1e-6)


def test_whitened_has_mean_zero_and_variance_one_over_the_mask():
    x = torch.tensor([[1.0, 5.0, 100.0], [3.0, 7.0, -50.0]])
    mask = torch.tensor([[True, True, False]] * 2)
    found = whitened(x, mask)
    assert found[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert found[mask].square().mean().item() == pytest.approx(1, rel=1e-5)
    assert not found[~mask].any()
    assert not whitened(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool)).any()


def test_a_fixed_coefficient_stays():
    control = KLControl(0.1)
    control.update(1e9, 64)
    assert control.coefficient == 0.1


def test_an_adaptive_one_follows_its_target_by_a_fifth_at_most():
    control = KLControl(0.1, target=2.0, horizon=100)
    control.update(2.2, 10)
    assert control.coefficient == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    control = KLControl(0.1, target=2.0, horizon=100)
    control.update(200.0, 10)
    assert control.coefficient == pytest.approx(0.1 * 1.02)
    control.update(0.0, 10)
    assert control.coefficient == pytest.approx(0.1 * 1.02 * 0.98)


NUMBERS = [(-1, None, "--kl-coef -1"), (float("nan"), None, "nan"), (1, 0, "--kl-target 0")]


@pytest.mark.parametrize(("coefficient", "target", "said"), NUMBERS)
def test_numbers_out_of_range_are_refused(coefficient, target, said):
    with pytest.raises(ValueError, match=f"{said} is out of range"):
        KLControl(coefficient, target)
