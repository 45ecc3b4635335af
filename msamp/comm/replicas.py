"""Check that the replicas of a weight on several ranks are finite and the same, bit for bit.

Data-parallel ranks start from the same weights and apply the same updates, so any difference is a fault: a flipped bit in memory, or a
collective that went wrong. Nothing else reveals it, because each rank has its own loss. So each rank computes a 64-bit checksum per tensor,
and one small collective compares them.
"""

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from msamp.comm.bucket import as_bytes
from msamp.comm.collectives import Peers
from msamp.kernels import ops
from msamp.kernels.tables import Tables
from msamp.numerics.tensor import ScalingTensor, contiguous

_ROW = 4096  # words that are added without regard to their order


def checksum(x: Tensor) -> Tensor:
    """Return the checksum of a tensor in any dtype, int64 0-dim; a ScalingTensor's covers payload and scale. It changes with every flipped
    bit, and when rows of 32 KiB are swapped."""
    if isinstance(x, ScalingTensor):
        return checksum(x.payload) + 0x9E3779B1 * x.scale_inv.detach().view(torch.int32).to(torch.int64)
    flat = as_bytes(x.detach().contiguous().view(-1)) if x.numel() else torch.zeros(0, dtype=torch.uint8, device=x.device)
    words, rest = flat[: flat.numel() // 8 * 8], flat[flat.numel() // 8 * 8 :]
    words = (words.clone() if words.storage_offset() % 8 else words).view(torch.int64)
    rows = words.numel() // _ROW
    sums = words[: rows * _ROW].view(rows, _ROW).sum(1)
    places = 2 * torch.arange(rows, device=x.device) + 1  # odd, so that no bit is lost when the product wraps
    ends = words[rows * _ROW :].sum() + (rest.to(torch.int64) << 8 * torch.arange(rest.numel(), device=x.device)).sum()
    return (sums * places).sum() + (2 * rows + 1) * ends


@torch.no_grad()
def faults(weights: Mapping[str, Tensor], peers: Peers, *, finite: bool = True) -> list[str]:
    """Return one line per tensor that differs between the ranks or is not finite on one of them. Collective; waits for the device.

    Args:
        weights: by name, ScalingTensors or plain tensors, the same ones in the same order on every rank.
        peers: the ranks that hold a copy.
        finite: whether a weight that is not finite is a fault too; if False, a single rank has nothing to check.

    Returns:
        The same lines on every rank, with global rank numbers.
    """
    if not weights or (peers.ranks == 1 and not finite):
        return []
    tensors = [x.detach() for x in weights.values()]
    sums = torch.stack([checksum(x) for x in tensors])
    spoiled = torch.zeros_like(sums)
    if finite:
        amaxes = ops.grad_stats(Tables(tensors[0].device), [contiguous(x) for x in tensors], squares=False)[0][0]
        spoiled = (~amaxes.isfinite()).to(torch.int64)
    largest = peers.all_reduce(torch.stack([sums, ~sums, spoiled]), dist.ReduceOp.MAX, "the weights' checksums", None)
    suspect = ((largest[0] != ~largest[1]) | (largest[2] > 0)).nonzero().flatten()
    if not suspect.numel():
        return []
    own = torch.stack([sums[suspect], spoiled[suspect]]).flatten()
    every = peers.all_gather(own, [own.numel()] * peers.ranks, "the checksums of differing weights").view(peers.ranks, 2, -1).cpu()
    ranks = [dist.get_rank() if dist.is_initialized() else 0] if peers.ranks == 1 else dist.get_process_group_ranks(peers.group)
    names = list(weights)
    return [line for at, i in enumerate(suspect.tolist()) for line in _lines(names[i], every[:, 0, at].tolist(), every[:, 1, at], ranks)]


def _lines(name: str, sums: list[int], spoiled: Tensor, ranks: list[int]) -> list[str]:
    lines = []
    (usual, count), *others = Counter(sums).most_common()
    if others:
        odd = [rank for rank, checksum in zip(ranks, sums, strict=True) if checksum != usual]
        alike = [rank for rank, checksum in zip(ranks, sums, strict=True) if checksum == usual]
        if 2 * count > len(sums):
            lines.append(f"{name} differs on {_listed(odd)} from the other {count} copies")
        else:
            lines.append(f"{name} differs between {_listed(alike)} and {_listed(odd)}")
    bad = [rank for rank, is_bad in zip(ranks, spoiled.tolist(), strict=True) if is_bad]
    return [*lines, f"{name} holds NaN or infinity on {_listed(bad)}"] if bad else lines


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
