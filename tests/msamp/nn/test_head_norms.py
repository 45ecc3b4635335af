"""Norms of queries and keys in a packed projection against torch's own in FP64."""

import pytest
import torch
from torch.nn import functional

from helpers.numerics import make
from msamp.kernels import ops
from msamp.nn.attention_block import split_heads
from msamp.nn.block import Norm
from msamp.nn.head_norms import HeadNorms, HeadNormWeights

S, B, D, EPS = 5, 2, 16, 1e-5


def weights(rms: bool) -> HeadNormWeights:
    found = [1 + make("normal", (D,), seed=seed) / 4 for seed in range(4)]
    return HeadNormWeights(found[0], None if rms else found[1], found[2], None if rms else found[3])


def plain(qkv: torch.Tensor, held: HeadNormWeights, rms: bool, heads: int, groups: int) -> list[torch.Tensor]:
    query, key, value = split_heads(qkv, heads, groups)

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(x, (D,), weight, EPS) if rms else functional.layer_norm(x, (D,), weight, bias, EPS)

    return [norm(query, held.query_weight, held.query_bias), norm(key, held.key_weight, held.key_bias), value]


@pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_forward_and_backward_are_those_of_torch(heads: int, groups: int, rms: bool):
    qkv, held = make("normal", (S, B, (heads + 2 * groups) * D), seed=9), weights(rms)
    grads = [make("normal", (S, B, n, D), seed=seed) for seed, n in ((5, heads), (6, groups), (7, groups))]
    wide = qkv.double().requires_grad_()
    leaves = HeadNormWeights(*(None if x is None else x.double().requires_grad_() for x in held))  # type: ignore[arg-type]
    out = plain(wide, leaves, rms, heads, groups)
    given = [x for x in leaves if x is not None]
    want, *of_weights = torch.autograd.grad(out, [wide, *given], [g.double() for g in grads])

    packed = qkv.clone()
    norms = HeadNorms(packed, Norm(EPS, rms), held, heads, groups)
    for ours, theirs in zip(split_heads(packed, heads, groups), out, strict=True):
        torch.testing.assert_close(ours, theirs.detach().float(), rtol=1e-5, atol=1e-5)
    no_rotation = torch.empty(S, 0)
    grad = ops.rotary_backward(*grads, no_rotation, no_rotation, scale=None, amax_slot=None, dtype=torch.float32)[0]
    found = norms.backward(grad.view(S, B, -1), held)
    torch.testing.assert_close(grad.view(S, B, -1), want.float(), rtol=1e-4, atol=1e-5)
    assert [x is None for x in found] == [x is None for x in held]
    for ours, theirs in zip([x for x in found if x is not None], of_weights, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-4)
