"""Write a `torch_dist` checkpoint that plain megatron-core loads: torch's distributed checkpoint with megatron-core's planner.

megatron-core's `dist_checkpointing.save` starts a process to write. Here each rank writes its file itself, so that a thread can save while
training continues. The files are the same.
"""

import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.foreign.pickled import PLAN_FILE
from megatron.lm.checkpoint.foreign.torch_dist import COMMON_FILE, FORMAT_FILE
from megatron.lm.shell.files import to_write

FILES = (PLAN_FILE, COMMON_FILE, FORMAT_FILE)  # written by the first rank, in addition to its data
BACKEND = "torch_dist"


def write(folder: Path, items: Iterable[Item], common: Mapping[str, Any], objects: Iterable[str], group: dist.ProcessGroup | None) -> None:
    """Write the items of all ranks to `folder`, one file per rank, and the non-tensor values, and sync them to disk. Collective.

    Args:
        folder: must exist and be empty.
        items: this rank's chunks, under Megatron-LM's keys.
        common: plain values and an argparse.Namespace; the first rank's are written.
        objects: keys where a loader expects an object, which is None here; the first rank's are written.
        group: with a backend for CPU tensors; None is this process alone.

    Raises:
        OSError, RuntimeError: on every rank, if one cannot write.
    """
    first = group is None or dist.get_rank(group) == 0
    shards: dict[str, list[CheckpointableShardedTensor]] = {}
    for item in items:
        shards.setdefault(item.key, []).append(_shard(item))
    state: dict[str, Any] = {
        key: local_shards[0] if len(local_shards) == 1 else LocalShardsContainer(local_shards) for key, local_shards in shards.items()
    }
    for key in objects if first else ():
        state[key] = io.BytesIO()
        torch.save([None], state[key])  # how megatron-core stores an object
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as error:
        raise RuntimeError(next(iter(error.failures.values()))[0]) from None
    if first:
        with to_write(folder / COMMON_FILE, "wb") as stream:
            torch.save(dict(common), stream)
            stream.flush()
            os.fsync(stream.fileno())
        save_config(CheckpointingConfig(BACKEND, 1), str(folder))


def _shard(item: Item) -> CheckpointableShardedTensor:
    data = item.tensor.detach().cpu().contiguous()
    sharded = ShardedTensor(item.key, data, data.dtype, tuple(data.shape), item.shape, item.offset, axis_fragmentations=None)
    return CheckpointableShardedTensor.from_sh_ten(sharded)
