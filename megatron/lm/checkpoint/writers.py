"""Write checkpoints outside of a run, in one process: in Megatron-LM's format, or only weights from another source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.lm.checkpoint.files import storage
from megatron.lm.checkpoint.files.folder import digest_entries, iteration_folder, new_partial_folder, publish, write_info
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.foreign import write_torch_dist
from megatron.lm.checkpoint.megatron_content import MOMENTS, common, extra_states, megatron_items
from megatron.lm.checkpoint.reader import CheckpointReader
from megatron.lm.config import LATEST_CHECKPOINT_FILE
from msamp.optim.updates import MASTER


def write_weights(root: Path, info: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint at iteration 0 for `--load ROOT --finetune`, on any grid and with any recipe; return its folder.

    Args:
        root: folder of checkpoints.
        info: from `content.description`.
        weights: by their names in the unsharded model; any float dtype, which is kept.

    Raises:
        ValueError: if a weight does not have a float dtype.
        OSError: if the checkpoint cannot be written.
    """
    for name, x in weights.items():
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} is {x.dtype}; weights must be torch.float32, torch.bfloat16 or torch.float16")
    folder = iteration_folder(root, 0)
    partial = new_partial_folder(folder)
    storage.write(partial, [Item.whole(f"model/{name}", x.contiguous()) for name, x in weights.items()])
    write_info(partial, {**info, "files": digest_entries(partial.iterdir())})
    publish(folder)
    return folder


def write_megatron(saved: CheckpointReader, root: Path, *, states: bool = True) -> Path:
    """Write the checkpoint and its marker file under `root`, and return its folder.

    Args:
        saved: of any grid and precision.
        root: an empty folder.
        states: also write the optimizer's states, as FP32 masters and moments, if the optimizer is AdamW.

    Raises:
        ValueError: if a tensor of the checkpoint is damaged, or Megatron-LM's format does not have the model's parts.
        OSError, RuntimeError: if the folder cannot be written.
    """
    model = saved.config.model
    if model.num_experts is not None or model.qk_layernorm_scope != "head":
        part = f"--num-experts {model.num_experts}" if model.num_experts is not None else f"--qk-layernorm-scope {model.qk_layernorm_scope}"
        raise ValueError(f"to-megatron does not support a model with {part} yet: use to-hf, or export-bf16")
    names, layers = saved.names(), model.num_layers
    steps = [saved.step(name) for name in names] if states else []
    has_moments = all(f"{key}/{name}" in saved.stored.tensors for name in names for key in MOMENTS)
    whole = bool(steps) and all(step is not None for step in steps) and has_moments
    step = max((step for step in steps if step is not None), default=None) if whole else None
    folder = iteration_folder(root, saved.info["iteration"])
    folder.mkdir()
    own: list[Item] = []
    for name in names:
        scaled = bool(saved.format(name)[2])
        own.append(Item.whole(f"model/{name}", saved.values(name).bfloat16() if scaled else saved.weight(name)))
        if step is not None:
            states_of = [(key, saved.state(key, name)) for key in MOMENTS]
            own += [Item.whole(f"{key}/{name}", x) for key, x in ((MASTER.key, saved.values(name)), *states_of) if x is not None]
    write_torch_dist.write(folder, list(megatron_items(own, (), (), layers)), common(saved.info, step), extra_states(layers), None)
    (root / LATEST_CHECKPOINT_FILE).write_text(str(saved.info["iteration"]), encoding="utf-8")
    return folder
