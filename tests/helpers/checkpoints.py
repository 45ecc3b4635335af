"""Checkpoints of the tiny run, to look into, to change and to compare.

folder = checkpoints.saved(prefix, tmp_path, opt_level="O2")
checkpoints.rewrite(latest(folder), {"model/decoder.final_layernorm.weight": torch.ones(3)})
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers import tiny
from megatron.lm.checkpoint.files.folder import (
    INFO_FILE,
    digest_entries,
    iteration_folder,
    new_partial_folder,
    publish,
    read_info,
    write_info,
)
from megatron.lm.checkpoint.files.storage import Item, Stored, write
from megatron.lm.checkpoint.files.versions import VERSION
from megatron.lm.config import Config
from megatron.lm.run.trainer import Trainer
from megatron.lm.training.run_record import Run
from megatron.lm.training.state import Training

MARKER = "latest_checkpointed_iteration.txt"
LEVELS = ("fp32", "bf16", "O1", "O2", "O3")


def saved(prefix: Path | str, folder: Path, **settings: Any) -> Path:
    """`folder`, with the checkpoint of a finished run of 4 steps."""
    tiny.run(tiny.config(prefix, **({"train_iters": 4, "save": str(folder)} | settings)))
    return folder


def written(root: Path, iteration: int, text: str = "data", **info: Any) -> Path:
    """A whole checkpoint of one file that holds `text`, ready to be published; returns where it will stand."""
    folder = iteration_folder(root, iteration)
    partial = new_partial_folder(folder)
    (partial / "data").write_text(text)
    files = digest_entries([partial / "data"])
    write_info(partial, {"version": VERSION, "iteration": iteration, "text": text, "files": files} | info)
    return folder


def published(root: Path, iteration: int, text: str = "data", *, problem: str | None = None, **info: Any) -> Path:
    """The same, published; `problem`: why it is unhealthy."""
    folder = written(root, iteration, text, health={"problem": problem}, **info)
    publish(folder, mark=problem is None)
    return folder


def of(run: Run) -> dict[str, Any]:
    """For `published`: a checkpoint of this run."""
    return {"run": run.entry()}


def pointed(config: Config, **changes: Any) -> Config:
    """`config` with other settings of its checkpoints."""
    return replace(config, checkpoint=replace(config.checkpoint, **changes))


def everything(made: Trainer) -> list[Tensor]:
    """Every bit of this rank's model, states, scales, mu, loss scale, schedule, place in the run and random generator."""
    training = made.training
    tensors: list[Any] = [value for key, value in training.model.state_dict().items() if not key.endswith("_extra_state")]
    for holding in training.optimizer.holdings():
        tensors += [value for _, value in sorted(training.optimizer.state.get(holding.weight, {}).items())]
    tensors += training.grad_sync.state_dict()["mu"].values()
    if training.loss_scaler is not None:
        tensors.append(torch.tensor(list(training.loss_scaler.state_dict().values())))
    place = [training.iteration, training.schedule.num_steps, training.consumed_samples, training.grad_sync.steps]
    rates = [group["lr"] for group in training.optimizer.param_groups]
    return tiny.bits([*tensors, torch.get_rng_state(), torch.tensor(place), torch.tensor(rates, dtype=torch.float64)])


def move(training: Training, iteration: int) -> None:
    """Put a run at an iteration without its steps, as far as a save can see."""
    training.iteration, training.consumed_samples = iteration, iteration * training.batch_size


def trained(settings: Config) -> tuple[list[float], list[Tensor]]:
    """Losses (rank 0 has them) and final bits of a run."""
    rows: list[dict[str, Any]] = []
    with tiny.trainer(settings) as made:
        made.metrics.write = rows.append  # type: ignore[method-assign]
        made.run()
        return tiny.losses(rows), everything(made)


def resume(prefix: Path, folder: Path, **settings: Any) -> list[float]:
    """Losses of an O2 run that goes on from `folder` to its sixth step."""
    return tiny.losses(tiny.run(tiny.config(prefix, **({"opt_level": "O2", "train_iters": 6, "load": str(folder)} | settings))))


def contents(folder: Path) -> dict[str, bytes]:
    """All files in and below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tensors(folder: Path) -> dict[str, Tensor]:
    """All that one checkpoint stores, by key."""
    stored = Stored(folder)
    return {key: stored.tensor(key) for key in stored.tensors}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two checkpoints store the same bits under the same keys."""
    return a.keys() == b.keys() and tiny.same(tiny.bits(a[key] for key in sorted(a)), tiny.bits(b[key] for key in sorted(b)))


def rewrite(folder: Path, changed: Mapping[str, Tensor], without: Iterable[str] = ()) -> None:
    """Write a checkpoint of one process again, sound in its digests and its seal, with other tensors."""
    held = {key: x for key, x in (tensors(folder) | dict(changed)).items() if key not in set(without)}
    info = read_info(folder)
    shutil.rmtree(folder)
    write(folder, [Item.whole(key, x) for key, x in held.items()])
    seal(folder, info)


def seal(folder: Path, info: Mapping[str, Any] | None = None, **changes: Any) -> None:
    """Write `checkpoint.json` anew, with digests and a seal that fit what is in the folder."""
    kept = dict(info or json.loads((folder / INFO_FILE).read_text(encoding="utf-8")))
    kept.pop("seal")
    files = digest_entries(path for path in folder.iterdir() if path.name != INFO_FILE)
    write_info(folder, kept | {"files": files} | changes)
