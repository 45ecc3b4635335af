"""Write a checkpoint that contains only weights, from tensors of another source."""

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
    """Write a checkpoint at iteration 0 for `--load ROOT --finetune`, on any grid and with any recipe.

    Args:
        root: folder of checkpoints.
        config: of the model, and of the data's tokenizer.
        vocab_size: of the tokenizer; the embedding may have more rows.
        weights: by their names in the unsharded model; any float dtype, which is kept.

    Returns:
        The checkpoint's folder.

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
    write_info(partial, description(config, vocab_size, processes=1) | {"files": digest_entries(partial.iterdir())})
    publish(folder)
    return folder
