"""Read a checkpoint in one process for tools and inference: whole tensors under the names of the unsharded model."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.lm.checkpoint.content import scale_key
from megatron.lm.checkpoint.files.folder import INFO_FILE, check_files, latest, read_info
from megatron.lm.checkpoint.forms.expert_tensors import separate
from megatron.lm.checkpoint.loading import judge, open_stored, take_model
from megatron.lm.checkpoint.place import Place
from megatron.lm.checkpoint.tensor_reader import check_number
from megatron.lm.checkpoint.values import StoredTensor, find, find_whole
from megatron.lm.config import Config, ParallelConfig
from megatron.lm.config.cli import config_from_dict
from megatron.lm.config.rules.check import single_values
from megatron.lm.config.sections.precision import build_recipe
from megatron.lm.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron.lm.model.gpt import build_model
from megatron.lm.model.initial import take_initial_weights
from megatron.lm.processes import process_groups
from megatron.lm.training.run_record import health_problem
from msamp.numerics.formats import of_dtype
from msamp.optim.updates import MASTER


class CheckpointReader:
    """A checkpoint of any grid.

    Args:
        folder: of checkpoints (the newest healthy one is read), or of one checkpoint; if that is unhealthy, a warning is printed.

    Attributes:
        folder: of the checkpoint.
        info: contents of its `checkpoint.json`.
        stored: all its tensors.

    Raises:
        ValueError: if there is no complete checkpoint, or a file is damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.folder = folder if (folder / INFO_FILE).is_file() else latest(folder)
        self.info: dict[str, Any] = read_info(self.folder)
        problem = health_problem(self.info)
        if problem is not None:
            print(f"warning: {self.folder} is unhealthy: {problem}", flush=True)
        check_files(self.folder, self.info["files"])
        judge(self.folder, self.info)
        self.stored = open_stored(self.folder, self.info)

    @property
    def config(self) -> Config:
        """Return the configuration of the run that wrote it."""
        return config_from_dict(self.info["config"])

    def names(self) -> list[str]:
        """Return the names of the model's weights, as in the state_dict of the unsharded model."""
        keys = (key.removeprefix("model/") for key in self.stored.tensors if key.startswith("model/"))
        return [name for name in keys if ".scaling." not in name and ".scale_inv@" not in name]

    def separate_experts(self) -> "CheckpointReader":
        """Return this checkpoint with a weight per expert, named as in a run with FP8 experts; itself if it has no other experts."""
        view = copy.copy(self)
        view.stored = separate(self.stored)
        return view

    def format(self, name: str) -> tuple[torch.dtype, torch.Size, int]:
        """Return the dtype of a weight's payload, its whole shape, and its number of chunks with their own scale (0: no scale)."""
        entry = self.stored.tensors[f"model/{name}"]
        scales = sum(scale_key(f"model/{name}", chunk.offset) in self.stored.tensors for chunk in entry.chunks)
        return entry.dtype, entry.shape, scales

    def values(self, name: str) -> Tensor:
        """Return the whole weight in FP32: its master if there is one, else the weight with its remainder."""
        return self._find(MASTER.key if f"{MASTER.key}/{name}" in self.stored.tensors else "model", name, find_whole).values()

    def state(self, key: str, name: str) -> Tensor | None:
        """Return a whole optimizer state of a weight in FP32, such as exp_avg; None if the checkpoint has none."""
        return self._find(key, name, find_whole).values() if f"{key}/{name}" in self.stored.tensors else None

    def step(self, name: str) -> int | None:
        """Return the number of optimizer updates of a weight; None if the checkpoint does not contain it.

        Raises:
            ValueError: if it is not a number from 0 to the checkpoint's iteration.
        """
        if f"step/{name}" not in self.stored.tensors:
            return None
        step = self.stored.tensor(f"step/{name}")
        check_number(self.stored, f"step/{name}", step, 0, self.info["iteration"], torch.float32)
        return int(step)

    def weight(self, name: str) -> Tensor:
        """Return the whole weight as saved: a ScalingTensor if it has one scale, FP32 if its chunks have several."""
        tensor = self._find("model", name)
        if not tensor.scales:
            return tensor.payload
        return tensor.values() if tensor.scale_inv is None else tensor.to(of_dtype(tensor.payload.dtype), torch.bfloat16)

    def _find(self, prefix: str, name: str, find: Callable[..., StoredTensor] = find) -> StoredTensor:
        size = self.stored.tensors[f"{prefix}/{name}"].shape
        if not size.numel():
            raise ValueError(f"{self.folder} is damaged: {prefix}/{name} is {tuple(size)}, which is empty; load an older checkpoint")
        place = Place(name=name, shape=tuple(size), offset=(0,) * len(size), start=0, sizes=tuple(size), first=True)
        tensor = find(self.stored, prefix, [place], size, self.info["vocab_size"])
        tensor.check(self.folder)
        return tensor


def load_for_inference(path: str | Path) -> tuple[nn.Module, Config, Tokenizer]:
    """Load the newest checkpoint in `path`, of any grid, in one process; return the model in evaluation mode, configuration and tokenizer.

    Creates megatron-core's process groups, with one rank, if there are none.

    Raises:
        ValueError: if there is no complete checkpoint, or it does not contain the model of its configuration.
    """
    saved = CheckpointReader(path)
    config = replace(saved.config, parallel=ParallelConfig())
    problems = [*single_values(config.model), *single_values(config.precision)]
    if problems:
        raise ValueError(f"{saved.folder} has an invalid configuration: {'; '.join(problems)}; load an older checkpoint")
    if not torch.distributed.is_initialized():
        process_groups.initialize(config)
    recipe, vocab_size = build_recipe(config.precision), saved.info["vocab_size"]
    model = build_model(config.model, config.parallel, config.precision, config.training, recipe, vocab_size)
    take_model(model, saved.stored, vocab_size)
    take_initial_weights(model)  # not needed, since there will be no master weight
    return model.eval(), config, build_tokenizer(config.data, config.model.vocab_size)
