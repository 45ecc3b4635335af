"""Stop a run if data-parallel copies of the weights differ: compare them before every save, and every
`--check-weight-hash-across-dp-replicas-interval` iterations.
"""

import torch.distributed as dist

from megatron.lm.errors import RunStopped
from megatron.lm.model.initial import parameter_names
from megatron.lm.training.state import Training
from msamp.comm.replicas import faults

NAMED = 8  # faults that a message names at most


def check_replicas(training: Training, iteration: int, *, finite: bool = True) -> None:
    """Compare the copies of every part of the model. Collective; waits for the device.

    Args:
        training: the training state, whose weights are compared.
        iteration: the last iteration, for the message.
        finite: whether a NaN or infinite weight is a fault too; a save writes such weights, as an unhealthy checkpoint.

    Raises:
        RunStopped: on every rank, with tensors and ranks, if copies differ or a weight is NaN or infinite on any rank.
    """
    training.optimizer.wait()
    sync, names = training.grad_sync, parameter_names(training.model)
    apart = frozenset() if sync.others is None else sync.others.params
    own_faults = faults({name: p for p, name in names.items() if p not in apart}, sync.peers, finite=finite)
    if sync.others is not None:  # experts that other ranks do not have
        own_faults += faults({name: p for p, name in names.items() if p in apart}, sync.others.peers, finite=finite)
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, own_faults)
    damage = list(dict.fromkeys(line for lines in everywhere for line in lines))  # every rank with a copy reports the same
    if damage:
        more = f"; and {len(damage) - NAMED} more" if len(damage) > NAMED else ""
        raise RunStopped(
            f"the weights are damaged after iteration {iteration}: {'; '.join(damage[:NAMED])}{more}. No checkpoint was saved after it."
            " If it is always the same rank, remove its machine and check its memory. Resume from the previous checkpoint with --ckpt-step"
        )
