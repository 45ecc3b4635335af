"""Checks of a gradient synchronizer's arguments, before it is built."""

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from msamp.comm.accumulate import ACCUMULATORS, OWNER
from msamp.comm.collectives import OtherRanks, Peers
from msamp.comm.exchange import Exchange, SummingWire, Wire
from msamp.numerics.formats import Format


def check_sums_in_fp32(exchange: Exchange, wires: Mapping[Format, Wire]) -> None:
    """Raise a ValueError unless the owner of a row can sum micro-batches in FP32."""
    for wire in wires.values():
        if not (exchange.sums_in_fp32 and isinstance(wire, SummingWire)):
            raise ValueError(
                f"gradient accumulation {OWNER!r} requires FP32 sums at the owner, and gradient exchange {exchange} has none; choose "
                f"exchange 'fp32-sum', or accumulation {', '.join(ACCUMULATORS)}"
            )


def check_formats(names: Mapping[Tensor, str], formats: Mapping[Tensor, Format]) -> None:
    """Raise a ValueError for a parameter without a gradient format, or with an unsupported dtype."""
    for p, name in names.items():
        if p not in formats:
            raise ValueError(f"{name} has no gradient format; pass one for every parameter that requires a gradient")
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} is {p.dtype}; gradient synchronization supports torch.float32, torch.bfloat16 and torch.float16")


def check_sums(sums: Sequence[tuple[Peers, Sequence[Tensor]]], names: Mapping[Tensor, str], formats: Mapping[Tensor, Format]) -> None:
    """Raise a ValueError for sums over further ranks of scaled gradients, or of several formats at once."""
    for _, params in sums:
        for p in params:
            if p not in names:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is listed in sums but requires no gradient; leave it out")
            if formats[p].scaled or formats[p] != formats[params[0]]:
                raise ValueError(
                    f"the gradient of {names[p]} is {formats[p]} and is summed together with {names[params[0]]}, {formats[params[0]]}; "
                    "make both FP32 or both BF16"
                )


def check_same_on_all_ranks(names: Mapping[Tensor, str], formats: Mapping[Tensor, Format], peers: Peers, others: OtherRanks | None) -> None:
    """Raise a ValueError on every rank if parameters differ in name, shape, dtype or gradient format on the ranks that average them."""
    apart = frozenset() if others is None else others.params
    lines = {p: f"{name} {tuple(p.shape)} {p.dtype}, gradient {formats.get(p)}" for p, name in names.items()}
    _compare([line for p, line in lines.items() if p not in apart], peers)
    if others is not None:
        _compare([line for p, line in lines.items() if p in apart], others.peers)


def _compare(own_lines: list[str], peers: Peers) -> None:
    if peers.ranks == 1:
        return
    lists: list[list[str]] = [[] for _ in range(peers.ranks)]
    peers.run(lambda: dist.all_gather_object(lists, own_lines, group=peers.group), "comparison of the ranks' models")
    for rank, theirs in enumerate(lists):
        for a, b in itertools.zip_longest(lists[0], theirs, fillvalue="nothing"):
            if a != b:
                raise ValueError(f"the ranks' models differ: where rank 0 has {a}, rank {rank} has {b}; build the same model on every rank")
