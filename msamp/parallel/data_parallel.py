"""Build the gradient synchronizer of a model: assign its parameters to buckets, and each bucket's rows to the ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from msamp.comm.collectives import OtherRanks, Peers
from msamp.comm.grad_sync import GradSync
from msamp.comm.partition import BucketPlan, numbered, plan_buckets
from msamp.numerics.formats import Format

# 128 MiB of FP8. With 2^25 a step of GPT-1.3B would have four times as many collectives, each of which costs the host 0.1 to 0.2 ms.
BUCKET_ELEMENTS = 2**27


def grad_sync(
    model: nn.Module,
    formats: Mapping[Tensor, Format],
    group: dist.ProcessGroup | None = None,
    *,
    bucket_elements: int = BUCKET_ELEMENTS,
    sums: Sequence[tuple[Peers, Sequence[Tensor]]] = (),
    whole: Iterable[Tensor] = (),
    others: OtherRanks | None = None,
    **options: Any,
) -> GradSync:
    """Return a GradSync whose buckets fill in the order of backward and are balanced over the ranks.

    Args:
        model: the model whose gradients are synchronized.
        formats: gradient format of every parameter that requires a gradient.
        group: the data-parallel ranks; None for one process.
        bucket_elements: elements per bucket; a larger parameter gets a separate bucket.
        whole: parameters that are never split, however uneven the load: for an update that requires whole matrices (Muon).
        sums: as in GradSync; entries without parameters or other ranks have no effect.
        others: as in GradSync; its parameters get separate buckets, whose rows its ranks own.
        options: other arguments of GradSync.
    """
    params = [p for p in model.parameters() if p.requires_grad and p in formats]
    params.reverse()
    ranks = 1 if group is None else dist.get_world_size(group)
    # Gradients that must wait for such a sum do not share a bucket with gradients that need not wait.
    sums = [(peers, members) for peers, members in sums if members and peers.ranks > 1]
    summed = {p for _, members in sums for p in members}
    uncut, apart = set(whole), frozenset() if others is None else others.params
    plan: list[BucketPlan] = []
    for here, size in ((False, ranks), (True, 1 if others is None else others.peers.ranks)):
        numbers = [i for i, p in enumerate(params) if (p in apart) == here]
        kinds = [formats[params[i]].name + (" summed" if params[i] in summed else "") for i in numbers]
        kept = [place for place, i in enumerate(numbers) if params[i] in uncut]
        part = plan_buckets([params[i].shape for i in numbers], kinds, size, bucket_elements, whole=kept)
        plan += [numbered(bucket, numbers) for bucket in part.buckets]
    plan.sort(key=lambda bucket: max(bucket.tensors))  # in the order in which they fill
    return GradSync(model, formats, plan, group, sums=sums, others=others, **options)
