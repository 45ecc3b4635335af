"""Sum the FP8 payloads of many ranks in a given order, rounding each addition: the error depends on the order.

A sum that grows rank by rank soon reaches the size of the final sum, and every later payload is rounded at that coarse step: N - 1
roundings of about the same size. A tree adds sums of equal size, and a payload takes part in log2 N roundings. NCCL uses rings (chains),
trees, and chains inside a node with a tree between nodes, by message size and topology.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from msamp.comm.exchange import NCCLWire
from msamp.numerics.formats import Format
from msamp.numerics.quantize import quantize

CHAIN, NODES, TREE = "chain", "chains-of-8-then-tree", "tree"
NODE = 8  # GPUs per node


def chain(payloads: Tensor, fmt: Format) -> Tensor:
    """Add payloads [ranks, n] in rank order, rounding each sum to `fmt`; [n]."""
    total = payloads[0]
    for payload in payloads[1:]:
        total = quantize(total.float() + payload.float(), 1.0, fmt)
    return total


def tree(payloads: Tensor, fmt: Format) -> Tensor:
    """Add neighbours, then their sums, and so on, rounding each sum to `fmt`; with an odd number, the last waits. [ranks, n] -> [n]."""
    while len(payloads) > 1:
        pairs = len(payloads) // 2
        sums = quantize(payloads[: 2 * pairs : 2].float() + payloads[1 : 2 * pairs : 2].float(), 1.0, fmt)
        payloads = torch.cat([sums, payloads[2 * pairs :]])
    return payloads[0]


def chains_then_tree(payloads: Tensor, fmt: Format) -> Tensor:
    """Add each `NODE` ranks as a chain, and the nodes' sums as a tree; [ranks, n] -> [n]."""
    return tree(torch.stack([chain(node, fmt) for node in payloads.split(NODE)]), fmt)


ORDERS: Mapping[str, Callable[[Tensor, Format], Tensor]] = MappingProxyType({CHAIN: chain, NODES: chains_then_tree, TREE: tree})


class OrderedWire(NCCLWire):
    """`NCCLWire` with the additions in one of `ORDERS`, for payloads that are all in one process."""

    def __init__(self, fmt: Format, order: str) -> None:
        super().__init__(fmt)
        self.add = ORDERS[order]

    def _sum(self, received: Tensor | Sequence[Tensor]) -> Tensor:
        return self.add(received if isinstance(received, Tensor) else torch.stack(list(received)), self.format)
