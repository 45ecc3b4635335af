"""The reduce-scatter of FSDP2 with FP8 payloads and sums in FP32 (FP8-LM section 2.1).

FSDP2 hands the gradients of a module to a custom reduce-scatter as one flat buffer, and expects the sum of this rank's part in another. The
buffer names no parameter. It contains, for each rank, that rank's rows of every parameter that has a gradient, padded to the rows per rank:

    rank 0: | rows of p0 | rows of p1 | ... | rank 1: | rows of p0 | rows of p1 | ...

From the parameters of the module and which of them require a gradient, `FP8ReduceScatter` derives where each one is. Then

1. the ranks agree on the largest amax of each FP8 gradient, so that all use the smallest of their scales, in one small all-reduce,
2. one launch casts these gradients to FP8, one byte per element,
3. an all-to-all sends every rank its rows from all ranks,
4. it sums them in FP32 in the order of the ranks, multiplies by scale_inv and the factor of the reduction, and rounds once to the output.

So the result does not depend on the network's algorithm, and is the same for any rank that sums it. With a non-finite gradient on one rank
the whole gradient is NaN on all of them. Gradients of vectors, and of matrices that the recipe does not store in FP8, are reduced as FSDP2
does without this.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from msamp.comm.collectives import Peers
from msamp.comm.counters import WireBytes
from msamp.kernels import ops
from msamp.kernels.tables import Tables
from msamp.numerics.formats import E4M3, E5M2, Format
from msamp.numerics.granularity import TENSORWISE
from msamp.numerics.scaling import inverse
from msamp.optim.grad_cast import ALIGNMENT

FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}
_OUTPUTS = (torch.float32, torch.bfloat16)


def format_of(name: str) -> Format:
    """Return the format of the payloads; ValueError for one that is not FP8."""
    if name not in FORMATS:
        raise ValueError(f"reduce_format is {name!r}; choose {' or '.join(map(repr, FORMATS))}, or None for FSDP2's own reduce-scatter")
    return FORMATS[name]


class BufferPiece(NamedTuple):
    """A parameter in every rank's part of the buffer: its first element there, its elements with padding, and whether it is sent in FP8."""

    start: int
    elements: int
    narrow: bool


class FP8ReduceScatter:
    """The custom reduce-scatter of one FSDP2 module (`FSDPModule.set_custom_reduce_scatter`).

    Args:
        module: its name, for messages.
        params: its sharded parameters in FSDP2's order, with whether each is sent in FP8.
        fmt: of the payloads.
        replaced: FSDP2's own reduce-scatter, which reduces the other gradients.

    Attributes:
        sent: the bytes that this rank sent in FP8.
    """

    def __init__(self, module: str, params: Mapping[DTensor, bool], fmt: Format, replaced: Any) -> None:
        self.module, self.params, self.format, self.replaced = module, params, fmt, replaced
        self.sent = WireBytes()
        self._tables: dict[str, Tables] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for FSDP2's buffers."""
        memory: torch.Tensor = self.replaced.allocate(size, dtype=dtype, device=device)
        return memory

    @torch.no_grad()
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce `input_tensor` [ranks * n] to this rank's `output_tensor` [n], of the same dtype.

        op: AVG, SUM, or a PREMUL_SUM.

        Raises:
            ValueError: for another `op`, or buffers in FP16, whose range the sum could leave.
            RuntimeError: if the buffer does not contain all parameters that require a gradient.
        """
        if input_tensor.dtype not in _OUTPUTS:
            raise ValueError(
                f"gradients are reduced in {input_tensor.dtype}; an FP8 reduce-scatter requires a reduce_dtype of torch.float32 or "
                "torch.bfloat16"
            )
        peers = Peers(group, self.sent)
        factor = _factor(op, peers.ranks)
        chunks = input_tensor.view(peers.ranks, -1)
        parts = self._parts(chunks.shape[1], peers.ranks)
        narrow = [part for part in parts if part.narrow and part.elements]
        wide = [part for part in parts if not part.narrow and part.elements]
        if wide:
            self._reduce_wide(output_tensor, chunks, wide, group, op)
        if narrow:
            self._reduce_narrow(output_tensor, chunks, narrow, peers, factor)

    def _parts(self, elements: int, ranks: int) -> list[BufferPiece]:
        parts, start = [], 0
        for p, narrow in self.params.items():
            if p.requires_grad:
                size = -(-p.shape[0] // ranks) * p.shape[1:].numel()
                parts.append(BufferPiece(start, size, narrow))
                start += size
        if start != elements:
            raise RuntimeError(
                f"FSDP2 reduces {elements} gradient elements per rank of {self.module or 'the model'}, but its parameters that require a "
                f"gradient have {start}: some had none in this backward, and FSDP2 does not say which. Freeze them by "
                "requires_grad_(False), call set_reduce_scatter_unused_params(True) on the model if this torch has it, or pass "
                "reduce_format=None"
            )
        return parts

    def _reduce_wide(
        self, output: torch.Tensor, chunks: torch.Tensor, parts: Sequence[BufferPiece], group: dist.ProcessGroup, op: Any
    ) -> None:
        """Reduce gradients as FSDP2 does, from a separate buffer unless they are all of them."""
        sizes = [part.elements for part in parts]
        if sum(sizes) == chunks.shape[1]:
            self.replaced(output_tensor=output, input_tensor=chunks.view(-1), group=group, op=op)
            return
        own = torch.cat([chunks[:, part.start : part.start + part.elements] for part in parts], dim=1)
        summed = own.new_empty(own.shape[1])
        self.replaced(output_tensor=summed, input_tensor=own.view(-1), group=group, op=op)
        torch._foreach_copy_([output[part.start : part.start + part.elements] for part in parts], list(summed.split(sizes)))

    def _reduce_narrow(self, output: torch.Tensor, chunks: torch.Tensor, parts: Sequence[BufferPiece], peers: Peers, factor: float) -> None:
        rows = [chunk[part.start : part.start + part.elements] for chunk in chunks.unbind() for part in parts]
        amaxes = TENSORWISE.amaxes(rows).view(peers.ranks, -1).amax(0)
        amaxes = peers.all_reduce(amaxes, dist.ReduceOp.MAX, "the amaxes of gradients", None)
        scales = ops.scale_from_amax(amaxes, self.format.max, None, 1.0)
        scale_invs = inverse(scales).add_(amaxes, alpha=0.0)  # 0 times Inf or NaN is NaN
        starts, width = [], 0
        for part in parts:
            starts.append(width)
            width += -(-part.elements // ALIGNMENT) * ALIGNMENT
        message = torch.empty(peers.ranks * width, dtype=torch.uint8, device=output.device).view(self.format.dtype)
        pieces = [
            (rank * len(parts) + i, 0, part.elements, rank * width + starts[i])
            for rank in range(peers.ranks)
            for i, part in enumerate(parts)
        ]
        ops.pack(self._table("cast", output.device), rows, pieces, message, scales.repeat(peers.ranks))
        received = peers.all_to_all(message, [width] * peers.ranks, f"the gradients of {self.module or 'the model'}")
        targets = [(i, start, part.elements, part.start) for i, (start, part) in enumerate(zip(starts, parts, strict=True))]
        ops.pack(self._table("round", output.device), [received] * len(parts), targets, output, scale_invs * factor, ranks=peers.ranks)

    def _table(self, which: str, device: torch.device) -> Tables:
        if which not in self._tables or self._tables[which].device != device:
            self._tables[which] = Tables(device)
        return self._tables[which]


def _factor(op: Any, ranks: int) -> float:
    """Return the factor that the reduction multiplies the sum by."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, float):
            return factor
    raise ValueError(f"the reduction is {op}; an FP8 reduce-scatter supports AVG, SUM, and PREMUL_SUM by a number")


def use_fp8_reduce_scatter(model: nn.Module, narrow: Mapping[torch.Tensor, bool], fmt: Format | None) -> list[FP8ReduceScatter]:
    """Let the FSDP2 modules of a model reduce gradients in FP8, or again as FSDP2 does.

    Args:
        model: after `fully_shard`.
        narrow: for each parameter whether its gradient is sent in FP8; default: not.
        fmt: of the payloads; None is FSDP2's own reduce-scatter.

    Returns:
        The reduce-scatters, of the modules that have a parameter in FP8.

    Raises:
        ValueError: if this torch has no custom reduce-scatter, or FSDP2's groups of parameters are not where torch 2.11 to 2.13 have them.
    """
    if fmt is not None and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ValueError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter, which an FP8 reduce-scatter requires; upgrade torch "
            "(2.11 has it), or pass reduce_format=None"
        )
    reducers = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _groups(module, required=fmt is not None):
            former = getattr(group, "_reduce_scatter_comm", None)
            own = former.replaced if isinstance(former, FP8ReduceScatter) else former
            params = {param.sharded_param: narrow.get(param.sharded_param, False) for param in group.fsdp_params}
            if fmt is not None and any(params.values()):
                reducers.append(FP8ReduceScatter(name, params, fmt, own))
                module.set_custom_reduce_scatter(reducers[-1])  # type: ignore[arg-type]
            elif own is not former:
                module.set_custom_reduce_scatter(own)  # type: ignore[arg-type]
    return reducers


def _groups(module: FSDPModule, required: bool) -> list[Any]:
    """Return FSDP2's groups of a module's parameters, for which it has no public name."""
    state = module._get_fsdp_state()  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        one = getattr(state, "_fsdp_param_group", None)
        groups = [] if one is None else [one]
        if required and not hasattr(state, "_fsdp_param_group"):
            raise ValueError(
                f"FSDP2 of torch {torch.__version__} stores its parameters elsewhere than in 2.11 to 2.13, so an FP8 reduce-scatter cannot "
                "find its layout; use one of these versions, or pass reduce_format=None"
            )
    return [group for group in groups if hasattr(group, "fsdp_params")]
