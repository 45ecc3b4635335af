"""FSDP2's reduce-scatter in FP8: the FP32 sum of the ranks' payloads with one scale, to the bit, from FSDP2's own buffer."""

from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from helpers import dist
from msamp.numerics import formats
from msamp.numerics.quantize import quantize
from msamp.numerics.scaling import inverse, scale_from_amax
from msamp.parallel import fp8_reduce_scatter
from msamp.parallel.fp8_reduce_scatter import FP8ReduceScatter, format_of, use_fp8_reduce_scatter

SHAPES = {"even": (6, 24), "vector": (7,), "uneven": (5, 8), "frozen": (4, 4), "empty on a rank": (1, 16)}
NARROW = ("even", "uneven", "frozen", "empty on a rank")
OPS = {
    "avg": (torch.distributed.ReduceOp.AVG, 0.5),
    "sum": (torch.distributed.ReduceOp.SUM, 1.0),
    "premul": (torch.distributed._make_nccl_premul_sum(0.125), 0.125),
}


def gradient(name: str, rank: int, dtype: torch.dtype) -> torch.Tensor:
    seed = 10 * list(SHAPES).index(name) + rank
    return (torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)) * (1 + 30 * rank)).to(dtype)


def in_fsdps_layout(grads: list[torch.Tensor]) -> torch.Tensor:
    out = torch.empty(2, sum(-(-len(g) // 2) * g[0].numel() for g in grads), dtype=grads[0].dtype)
    torch._chunk_cat(grads, 0, 2, out=out)
    return out.view(-1)


class Summed:
    """Stands for FSDP2's reduce-scatter, over gloo, which has no PREMUL_SUM."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any) -> None:
        total = input_tensor.float()
        torch.distributed.all_reduce(total, group=group)
        output_tensor.copy_(total.view(2, -1)[group.rank()])


def reduced(dtype: torch.dtype, spoilt: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    rank, mesh = torch.distributed.get_rank(), init_device_mesh("cpu", (2,))
    params = {}
    for name, shape in SHAPES.items():
        rows = torch.zeros(-(-shape[0] // 2), *shape[1:])
        p = DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size(shape), stride=torch.zeros(shape).stride())
        params[name] = p.requires_grad_(name != "frozen")
    scatter = FP8ReduceScatter("block", {p: name in NARROW for name, p in params.items()}, formats.E4M3, Summed())
    names = [name for name in SHAPES if name != "frozen"]
    grads = [gradient(name, rank, dtype) for name in names]
    if spoilt and rank:
        grads[2][0, 0] = float("inf")
    flat = in_fsdps_layout(grads)
    found = {}
    for key, (op, _) in OPS.items():
        out = scatter.allocate((flat.numel() // 2,), dtype=dtype, device=flat.device)
        scatter(output_tensor=out, input_tensor=flat, group=mesh.get_group(), op=op)
        sizes = [-(-SHAPES[name][0] // 2) * torch.Size(SHAPES[name][1:]).numel() for name in names]
        found[key] = dict(zip(names, out.split(sizes), strict=True))
    found["sent"] = scatter.sent.total("weight")
    return found


def expected(name: str, dtype: torch.dtype, factor: float) -> torch.Tensor:
    grads = [gradient(name, rank, dtype).float() for rank in range(2)]
    if name not in NARROW:
        return (grads[0] + grads[1]).to(dtype)
    scale = scale_from_amax(torch.stack([g.abs().amax() for g in grads]).amax(), formats.E4M3.max)  # the smaller of both scales
    total = sum(quantize(g, scale, formats.E4M3).float() for g in grads)
    return (total * (inverse(scale) * factor)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_fp32_sum_of_fp8_payloads_with_one_scale_and_vectors_are_not_rounded(dtype):
    found = dist.run(reduced, 2, dtype)
    for key, (_, factor) in OPS.items():
        for name in found[0][key]:
            want = expected(name, dtype, factor)
            padded = torch.cat([want, want.new_zeros(-len(want) % 2, *want.shape[1:])])
            assert torch.cat([rank[key][name] for rank in found]).equal(padded.flatten()), (key, name)
    aligned = sum(-(-n // 16) * 16 for n in (3 * 24, 3 * 8, 16))
    assert [rank["sent"] for rank in found] == [3 * aligned] * 2  # a byte per element to the other rank


def test_a_gradient_that_is_not_finite_on_one_rank_is_nan_on_all():
    for rank in dist.run(reduced, 2, torch.bfloat16, True):
        assert rank["avg"]["uneven"].isnan().all()
        assert rank["avg"]["even"].isfinite().all()


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    p = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)]).requires_grad_()
    scatter = FP8ReduceScatter("block", {p: True}, formats.E4M3, Summed())
    messages = []
    for elements, dtype, op in (
        (12, torch.float32, torch.distributed.ReduceOp.AVG),
        (16, torch.float16, torch.distributed.ReduceOp.SUM),
        (16, torch.float32, torch.distributed.ReduceOp.MAX),
    ):
        try:
            scatter(torch.zeros(elements // 2, dtype=dtype), torch.zeros(elements, dtype=dtype), mesh.get_group(), op)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_other_buffers_dtypes_and_reductions_are_refused_by_name():
    for messages in dist.run(refused, 2):
        unused, half, op = messages
        assert "reduces 6 gradient elements per rank of block, but its parameters that require a gradient have 8" in unused
        assert "gradients are reduced in torch.float16" in half
        assert "the reduction is RedOpType.MAX; an FP8 reduce-scatter supports AVG, SUM" in op
    with pytest.raises(ValueError, match="reduce_format is 'bf16'; choose 'fp8-e4m3' or 'fp8-e5m2', or None"):
        format_of("bf16")


def installed() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (model[0], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    narrow = {model[0].weight: True}
    group = fp8_reduce_scatter._groups(model[0], required=True)[0]
    before = group._reduce_scatter_comm
    first = use_fp8_reduce_scatter(model, narrow, formats.E4M3)
    again = use_fp8_reduce_scatter(model, narrow, formats.E5M2)
    nested = again[0].replaced is before
    use_fp8_reduce_scatter(model, narrow, None)
    return {
        "modules": [each.module for each in first],
        "narrow": list(first[0].params.values()),
        "nested": nested,
        "restored": group._reduce_scatter_comm is before,
    }


def test_it_replaces_fsdps_own_once_and_gives_it_back():
    for found in dist.run(installed, 2):
        assert found == {"modules": ["0"], "narrow": [True, False], "nested": True, "restored": True}
