"""The definition of attention over a part of the keys, against torch's attention in FP64."""

import math

import pytest
import torch
from torch import Tensor

from msamp.kernels.reference.attention_part import attention_part, attention_part_backward

SCALE = 1 / math.sqrt(8)


def draw(queries: int, keys: int, heads: int, groups: int) -> list[Tensor]:
    """Query, key, value and the output's gradient."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(queries, heads), (keys, groups), (keys, groups), (queries, heads)]
    return [torch.randn(s, 2, n, 8, generator=generator) for s, n in sizes]


@pytest.mark.parametrize(("queries", "keys", "causal"), [(6, 6, True), (6, 6, False), (4, 10, False), (10, 4, False)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_output_statistics_and_gradients(queries: int, keys: int, causal: bool, heads: int, groups: int):
    q, k, v, grad = draw(queries, keys, heads, groups)
    exact = [x.double().permute(1, 2, 0, 3).requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True)
    o, lse = attention_part(q, k, v, SCALE, causal=causal)
    torch.testing.assert_close(o, expected.detach().permute(2, 0, 1, 3).float())
    scores = exact[0] @ exact[1].repeat_interleave(heads // groups, 1).transpose(2, 3) * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(lse, scores.detach().logsumexp(-1).float())
    gradients = torch.autograd.grad(expected, exact, grad.double().permute(1, 2, 0, 3))
    for got, wanted in zip(attention_part_backward(grad, q, k, v, o, lse, SCALE, causal=causal), gradients, strict=True):
        torch.testing.assert_close(got, wanted.permute(2, 0, 1, 3).float(), rtol=1e-4, atol=1e-5)


def test_gradients_of_two_parts_sum_to_those_of_the_whole():
    q, k, v, grad = draw(5, 8, 4, 2)
    o, lse = attention_part(q, k, v, SCALE, causal=False)
    whole = attention_part_backward(grad, q, k, v, o, lse, SCALE, causal=False)
    first, second = (attention_part_backward(grad, q, k[rows], v[rows], o, lse, SCALE, causal=False) for rows in (slice(3), slice(3, 8)))
    torch.testing.assert_close(first[0] + second[0], whole[0])
    torch.testing.assert_close(torch.cat([first[1], second[1]]), whole[1])
    torch.testing.assert_close(torch.cat([first[2], second[2]]), whole[2])


@pytest.mark.parametrize(
    ("key", "value", "causal", "message"),
    [
        ((6, 2, 3, 8), (6, 2, 3, 8), False, r"groups a divisor of the heads"),
        ((6, 2, 2, 8), (5, 2, 2, 8), False, r"key is \(6, 2, 2, 8\), value \(5, 2, 2, 8\).*\[keys, 2, groups, 8\]"),
        ((4, 2, 2, 8), (4, 2, 2, 8), True, r"\[6, 2, groups, 8\]"),
    ],
)
def test_shapes_that_do_not_match_are_refused(key: tuple[int, ...], value: tuple[int, ...], causal: bool, message: str):
    with pytest.raises(ValueError, match=message):
        attention_part(torch.zeros(6, 2, 4, 8), torch.zeros(key), torch.zeros(value), SCALE, causal=causal)
