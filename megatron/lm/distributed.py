"""Gradients of the data-parallel ranks: accumulated over micro-batches, averaged, handed to the optimizer as `p.main_grad`."""

import functools
import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msamp.numerics.formats import BF16, Format
from msamp.numerics.tensor import ScalingTensor

BUCKET = 2**24  # elements averaged in one all-reduce: 64 MiB of FP32


class GradSync:
    """Plain gradient averaging over a data-parallel group.

    Gradients enter by post-accumulate hooks: `p.grad` is taken into `p.main_grad` and dropped at once. A gradient whose
    format is FP8 is quantised as it appears where one rank computes one micro-batch a step; with several, it accumulates
    in BF16, is averaged, and is quantised once (accumulating in E4M3 loses 29 to 76 % over 256 micro-batches, quantising
    the sum once 3 %). The average itself travels in FP32.

    Args:
        formats: the gradient format of each parameter; a parameter without gradient in a step is left out of it.
        group: the data-parallel ranks; None for one process.
        micro_batches: of one rank in one step.
    """

    def __init__(self, formats: dict[nn.Parameter, Format], group: dist.ProcessGroup | None, micro_batches: int) -> None:
        self.formats = formats
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.quantize_at_once = self.ranks == 1 and micro_batches == 1
        # A weak reference: hooks live in autograd's graph, where the collector does not find a cycle back to the model.
        hook = functools.partial(_take, weakref.ref(self))
        for p in formats:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(hook)
        self.clear()

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        for p in self.formats:
            p.main_grad = None  # type: ignore[attr-defined]

    def _take(self, p: Tensor) -> None:
        fmt = self.formats[p]  # type: ignore[index]
        g, p.grad = p.grad, None
        assert g is not None
        if fmt.scaled and self.quantize_at_once:
            p.main_grad = ScalingTensor.quantize(g, fmt)  # type: ignore[attr-defined]
        elif p.main_grad is None:  # type: ignore[attr-defined]
            p.main_grad = g.to(BF16.dtype if fmt.scaled else fmt.dtype)  # type: ignore[attr-defined]
        else:
            p.main_grad += g  # type: ignore[attr-defined]

    @torch.no_grad()
    def finish(self) -> None:
        """Average over the ranks and bring every gradient to its format. A non-finite value of one rank reaches all of them."""
        if self.quantize_at_once:
            return
        present = [p for p in self.formats if p.main_grad is not None]  # type: ignore[attr-defined]
        for bucket in _buckets(present):
            for p, mean in zip(bucket, self._averages([p.main_grad for p in bucket]), strict=True):  # type: ignore[attr-defined]
                fmt = self.formats[p]
                p.main_grad = ScalingTensor.quantize(mean, fmt, dtype=p.dtype) if fmt.scaled else mean.to(fmt.dtype)  # type: ignore[attr-defined]

    def _averages(self, gradients: list[Tensor]) -> list[Tensor]:
        """Means over the ranks in FP32; one rank's gradients as they are."""
        if self.ranks == 1:
            return gradients
        flat = torch.cat([g.flatten().float() for g in gradients])
        dist.all_reduce(flat, group=self.group)
        flat /= self.ranks
        return [mean.view_as(g) for g, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True)]


def _take(sync: "weakref.ref[GradSync]", p: Tensor) -> None:
    alive = sync()
    if alive is not None:
        alive._take(p)


def _buckets(params: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters with at most BUCKET elements together (or one larger parameter)."""
    bucket: list[nn.Parameter] = []
    elements = 0
    for p in params:
        if bucket and elements + p.numel() > BUCKET:
            yield bucket
            bucket, elements = [], 0
        bucket.append(p)
        elements += p.numel()
    if bucket:
        yield bucket
