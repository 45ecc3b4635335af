"""Rules for checkpoints, logs and fault handling."""

import os
import stat
from pathlib import Path

from megatron.lm.config.sections.outputs import LATEST_CHECKPOINT_FILE
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.whole import Config, Problems, Rules


def loading(config: Config, world_size: int) -> Problems:
    """A checkpoint to load must exist."""
    checkpoint = config.checkpoint
    if checkpoint.load is None or checkpoint.resumes_itself:
        return  # the first start of a run that resumes itself finds no checkpoint
    folder = Path(checkpoint.load)
    if not os.path.isdir(folder):  # unlike Path.is_dir, raises no exception if a parent folder is not accessible
        yield f"--load {folder} is not a folder: give one that a run with --save wrote, or drop --load to start from scratch"
    elif not any(
        os.path.isfile(root / LATEST_CHECKPOINT_FILE) or any(root.glob("iter_*"))
        for root in (folder, *map(Path, filter(None, [checkpoint.non_persistent_folder(str(folder))])))
    ):
        yield (
            f"--load {folder} contains no checkpoint (and no {LATEST_CHECKPOINT_FILE}): give another, or drop --load to start from scratch"
        )


def saving(config: Config, world_size: int) -> Problems:
    """Checkpoints of different kinds are saved in different folders."""
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return
    beside = checkpoint.non_persistent_folder(checkpoint.save)
    if beside is not None and os.path.realpath(beside) == os.path.realpath(checkpoint.save):
        yield f"--non-persistent-global-ckpt-dir {beside} is also the folder of --save: give another"


def faults(config: Config, world_size: int) -> Problems:
    """The threshold of a spike must be above 1."""
    threshold = config.faults.loss_spike_threshold
    if 0 < threshold <= 1:
        yield f"--loss-spike-threshold {threshold:g} makes every loss a spike: give more than 1, such as 2, or 0 for none"


def outputs(config: Config, world_size: int) -> Problems:
    """Every output must be writable, and no two the same file."""
    folders = {
        "save": config.checkpoint.save,
        "non_persistent_global_ckpt_dir": config.checkpoint.non_persistent_global_ckpt_dir,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "wandb_save_dir": config.logging.wandb_save_dir,
        "data_cache_path": config.data.data_cache_path,
    }
    for name, folder in folders.items():
        if folder is not None:
            yield from _writable(f"{flag(name)} {folder}", Path(folder))
    files = {
        "metrics_file": config.logging.metrics_file,
        "record_precision": config.logging.record_precision,
        "fp8_gain_cache": config.precision.fp8_gain_cache,
        "memory_snapshot_path": config.profiling.memory_snapshot_path if config.profiling.record_memory_history else None,
    }
    named: dict[str, str] = {}
    for name, path in files.items():
        if path is not None:
            yield from _writable_file(name, Path(path))
            if not Path(path).is_char_device() and (other := named.setdefault(os.path.realpath(path), name)) != name:
                yield f"{flag(other)} and {flag(name)} name one file, {path}: give each its own"


def _writable_file(name: str, file: Path) -> Problems:
    """Yield a problem unless `file`, the value of a flag, can be written or created."""
    if os.path.isdir(file):
        yield f"{flag(name)} {file} is a folder: give a file in it"
    elif os.path.exists(file) and not (os.path.isfile(file) or (name != "fp8_gain_cache" and stat.S_ISCHR(os.stat(file).st_mode))):
        # Lines are appended: a cache is read back, which a device cannot do, and a pipe would wait for its reader.
        yield f"{flag(name)} {file} is not a regular file: give one"
    elif os.path.exists(file) and not os.access(file, os.W_OK):
        yield f"{flag(name)} {file} cannot be written: change its permissions, or choose another path"
    elif name in ("metrics_file", "record_precision") and os.path.isfile(file) and file.open("rb").read(1) not in (b"", b"{"):
        yield f"{flag(name)} {file} holds something other than lines of JSON, to which lines would be appended: choose another path"
    else:
        yield from _writable(f"{flag(name)} {file}", file.parent)


def _writable(what: str, folder: Path) -> Problems:
    """Yield a problem unless `folder` is writable or can be created in its nearest existing parent."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(nearest):
        yield f"{what}: {nearest} is a file, not a folder; choose another path"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{what}: no permission to write in {nearest}; choose another path, or change its permissions"


def weights_and_biases(config: Config, world_size: int) -> Problems:
    """A run of Weights & Biases needs a folder."""
    logging = config.logging
    if logging.wandb_project is not None and logging.wandb_save_dir is None and config.checkpoint.save is None:
        yield f"--wandb-project {logging.wandb_project} needs a folder for its files: add --wandb-save-dir FOLDER or --save FOLDER"


def profiles(config: Config, world_size: int) -> Problems:
    """A profile has iterations and ranks."""
    settings = config.profiling
    start, end, ranks = settings.profile_step_start, settings.profile_step_end, settings.profile_ranks
    if not settings.profile:
        return
    if start >= end:
        yield f"--profile-step-start {start} is not below --profile-step-end {end}: the iterations {start + 1} to {end} are profiled"
    if not ranks or max(ranks) >= world_size:
        given = " ".join(map(str, ranks)) or "without a value"
        yield f"--profile-ranks {given}: give ranks in [0, {world_size - 1}], since there are {world_size} processes"


RULES: Rules = {
    loading: ("checkpoint",),
    saving: ("checkpoint",),
    faults: ("faults",),
    profiles: ("profiling",),
    weights_and_biases: ("logging", "checkpoint"),
    outputs: ("checkpoint", "logging", "data", "precision", "profiling"),
}
