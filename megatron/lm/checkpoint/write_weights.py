"""Writes a checkpoint of weights alone, from tensors of another source."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.lm.checkpoint.content import description
from megatron.lm.checkpoint.files import storage
from megatron.lm.checkpoint.files.folder import digest_entries, iteration_folder, new_partial_folder, publish, write_info
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.config import Config


def write_weights(root: Path, config: Config, vocab_size: int, weights: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint that `--load ROOT --finetune` takes, at iteration 0, on any grid and at any level.

    Args:
        root: folder of checkpoints.
        config: of the model, and of the data's tokenizer.
        vocab_size: the tokenizer's; the embedding may have more rows.
        weights: by the names of a model without tensor and pipeline parallelism; any float dtype, kept as it is.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: a weight is not of a float dtype.
        OSError: the checkpoint cannot be written.
    """
    for name, x in weights.items():
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name} is {x.dtype}; give weights as torch.float32, torch.bfloat16 or torch.float16")
    folder = iteration_folder(root, 0)
    partial = new_partial_folder(folder)
    storage.write(partial, [Item.whole(f"model/{name}", x.contiguous()) for name, x in weights.items()])
    write_info(partial, description(config, vocab_size, processes=1) | {"files": digest_entries(partial.iterdir())})
    publish(folder)
    return folder
