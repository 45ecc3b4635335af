"""Rotary embedding outside of a fused block: the formula's values and gradients, in the memory of what is rotated."""

import pytest
import torch

from helpers.choices import every_value
from helpers.numerics import make
from msamp.nn.attention_block import split_heads
from msamp.nn.unfused import RotaryFunction

S, B, D = 10, 2, 8
SHAPES = [(4, 4, D), (4, 2, D), (4, 1, 4), (3, 3, 0)]  # heads, query groups, rotated channels of a head


def tables(r: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(S, device=device)[:, None] * 10000.0 ** -(torch.arange(r, device=device) % max(1, r // 2) / max(1, r // 2))
    return angles.float().cos(), angles.float().sin()


def by_formula(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Su et al. (2021), equation 34, in the dtype of `qkv`."""
    r, half = cos.shape[1], cos.shape[1] // 2

    def turn(x: torch.Tensor) -> torch.Tensor:
        other = torch.cat([-x[..., half:r], x[..., :half]], dim=-1)
        return torch.cat([x[..., :r] * cos[:, None, None].to(x) + other * sin[:, None, None].to(x), x[..., r:]], dim=-1)

    query, key, value = split_heads(qkv, heads, groups)
    return turn(query), turn(key), value


def packed(heads: int, groups: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return make("normal", (S, B, (heads + 2 * groups) * D), device=device).to(dtype)


@every_value
@pytest.mark.parametrize(("heads", "groups", "r"), SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_values_and_gradient_are_the_formula_s_rounded_once(heads, groups, r, dtype, tolerance, device):
    cos, sin = tables(r, device)
    x = packed(heads, groups, dtype, device).requires_grad_()
    exact = x.detach().double().requires_grad_()
    wanted = by_formula(exact, cos, sin, heads, groups)
    found = RotaryFunction.apply(x * 1, cos, sin, heads, groups)  # rotated where it lies: not the leaf
    grads = [make("log-normal", y.shape, seed=i, device=device).to(dtype) for i, y in enumerate(found)]
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    torch.autograd.backward(found, grads)
    torch.autograd.backward(wanted, [grad.double() for grad in grads])
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
