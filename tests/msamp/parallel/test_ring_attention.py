"""Ring attention against attention of one process: output, gradients, bytes, refusals."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import dist
from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.kernels.attention_part import attention_part
from msamp.parallel.ring_attention import RingAttention

LENGTH, BATCH, HEADS, GROUPS, CHANNELS = 24, 2, 4, 2, 16
SCALE = 1 / math.sqrt(CHANNELS)


def zigzag(x: Tensor, rank: int, ranks: int) -> Tensor:
    """The tokens of a rank, along dim 0."""
    chunks = x.chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def together(parts: list[Tensor]) -> Tensor:
    """The whole sequence from the parts of all ranks."""
    ranks = len(parts)
    chunks = [part.chunk(2) for part in parts]
    return torch.cat([chunks[r][0] for r in range(ranks)] + [chunks[r][1] for r in reversed(range(ranks))])


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value and the output's gradient; some rows of the softmax are sharp."""
    generator = torch.Generator().manual_seed(3)
    shapes = [HEADS, GROUPS, GROUPS, HEADS]
    return [(2 * torch.randn(LENGTH, BATCH, heads, CHANNELS, generator=generator)).to(dtype) for heads in shapes]


def whole(tensors: list[Tensor], *, causal: bool) -> list[Tensor]:
    """Output and gradients of one process, by torch's attention in FP64."""
    q, k, v = (x.double().permute(1, 2, 0, 3).requires_grad_() for x in tensors[:3])
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    grads = torch.autograd.grad(o, (q, k, v), tensors[3].double().permute(1, 2, 0, 3))
    return [x.detach().permute(2, 0, 1, 3) for x in (o, *grads)]


def on_ranks(tensors: list[Tensor], causal: bool, wire: str = "bf16") -> dict[str, Any]:
    group = torch.distributed.group.WORLD
    peers = Peers(group, WireBytes())
    *operands, grad = (zigzag(x, peers.rank, peers.ranks) for x in tensors)
    for x in operands:
        x.requires_grad_()
    o = RingAttention(peers, SCALE, causal, wire=wire)(*operands)
    forward = peers.sent.take()
    o.backward(grad.flatten(2))
    made = [o.detach().view(grad.shape), *(x.grad for x in operands)]
    return {"made": made, "forward": forward, "backward": peers.sent.take()}


@pytest.mark.parametrize(
    ("ranks", "causal", "dtype"), [(2, True, torch.float32), (3, True, torch.float32), (2, False, torch.float32), (2, True, torch.bfloat16)]
)
def test_the_ring_computes_what_one_process_does(ranks: int, causal: bool, dtype: torch.dtype):
    tensors = inputs(dtype)
    found = dist.run(on_ranks, ranks, tensors, causal)
    for number, expected in enumerate(whole(tensors, causal=causal)):
        got = together([one["made"][number] for one in found])
        assert got.dtype is dtype
        error = float((got - expected).norm() / expected.norm())
        assert error < (1e-6 if dtype is torch.float32 else 6e-3), number
    one_hop = 2 * LENGTH // ranks * BATCH * GROUPS * CHANNELS * dtype.itemsize
    for one in found:
        assert one["forward"] == {("activation", "keys and values ring"): (ranks - 1) * one_hop}
        assert one["backward"] == one["forward"] | {("activation", "grad of keys and values ring"): (ranks - 1) * one_hop}


def test_one_process_has_no_ring():
    q, k, v, grad = inputs()
    for x in (q, k, v):
        x.requires_grad_()
    o = RingAttention(Peers(None, WireBytes()), SCALE, causal=True)(q, k, v)
    o.backward(grad.flatten(2))
    expected, _ = attention_part(q, k, v, SCALE, causal=True)
    torch.testing.assert_close(o, expected.flatten(2))
    torch.testing.assert_close(k.grad, whole([q, k, v, grad], causal=True)[2].float(), rtol=1e-4, atol=1e-5)
