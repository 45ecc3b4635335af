"""Checkpoints: sharded, written atomically, and loadable with another grid or recipe.

`content` defines what a checkpoint contains, `files.folder` the files, `files.versions` earlier versions; `foreign` parses checkpoints of
other code.
"""

from megatron.lm.checkpoint.files.folder import exists, iteration_folder, latest
from megatron.lm.checkpoint.loading import load, saved_precision, saved_schedule, saved_settings
from megatron.lm.checkpoint.reader import CheckpointReader, load_for_inference
from megatron.lm.checkpoint.saving import Saver, save
from megatron.lm.checkpoint.writers import write_weights

__all__ = [
    "CheckpointReader",
    "Saver",
    "exists",
    "iteration_folder",
    "latest",
    "load",
    "load_for_inference",
    "save",
    "saved_precision",
    "saved_schedule",
    "saved_settings",
    "write_weights",
]
