"""The second checkpoint folder, for `--non-persistent-save-interval`, and the choice between both folders on resume.

A non-persistent checkpoint has the same format, but only the newest is kept. It is in `--non-persistent-global-ckpt-dir`, or in
`non_persistent` below `--save`. A run resumes from the newer of both folders. If the run goes back to an earlier iteration, by
`--ckpt-step` or a rollback, later non-persistent checkpoints belong to undone steps; `forget` deletes them, so they are not mistaken for
the newest.
"""

import contextlib
from pathlib import Path
from typing import Any

from megatron.lm.checkpoint.files.folder import (
    INFO_FILE,
    Candidates,
    candidates,
    exists,
    iteration_of,
    one_run,
    owner,
    remove,
    sealed_info,
    tidy,
)
from megatron.lm.config import LATEST_CHECKPOINT_FILE, CheckpointConfig
from megatron.lm.shell.files import not_a_link


def folder_of(settings: CheckpointConfig, root: str | Path) -> Path | None:
    """Return the folder of non-persistent checkpoints for `root`; None without `--non-persistent-save-interval`. ValueError if it is not
    named by a flag and is a link: saves would write to its target and delete there."""
    name = settings.non_persistent_folder(str(root))
    return None if name is None else Path(name) if settings.non_persistent_global_ckpt_dir else not_a_link(Path(name))


def any_in(settings: CheckpointConfig, root: Path) -> bool:
    """Return whether `root`, or its folder of non-persistent checkpoints, contains a checkpoint."""
    beside = folder_of(settings, root)
    return exists(root) or (beside is not None and exists(beside))


def owner_of(settings: CheckpointConfig, root: Path) -> dict[str, Any] | None:
    """Return `checkpoint.json` of a checkpoint that identifies the run in `root`; None if none can be read."""
    beside = folder_of(settings, root)
    return owner(root) or (None if beside is None else owner(beside))


def candidates_of(settings: CheckpointConfig) -> Candidates:
    """Return the checkpoints of one run to try for `--load`, best first: those of both folders by iteration."""
    assert settings.load is not None
    root = Path(settings.load)
    checkpoints, beside = candidates(root, settings.ckpt_step, unhealthy=settings.load_unhealthy), folder_of(settings, root)
    if beside is None:
        return checkpoints
    others = candidates(beside, settings.ckpt_step, unhealthy=settings.load_unhealthy)
    run, folders, remarks = owner(root), list(checkpoints.folders), [*checkpoints.remarks, *others.remarks]
    for folder in others.folders:
        with contextlib.suppress(ValueError):  # one that cannot be read stays: loading it reports that
            if run is not None and not one_run(run, sealed_info(folder)):
                remarks.append(f"passed over: {folder} is a checkpoint of another run")
                continue
        folders.append(folder)
    # A release of Megatron-LM has no iteration. Sorting is stable within a folder, where a replaced checkpoint follows its replacement.
    folders.sort(key=lambda folder: -(iteration_of(folder) or 0))
    return Candidates(folders, remarks)


def forget(folder: Path, after: int) -> list[str]:
    """Delete the checkpoints of a run later than `after`, its current iteration; return lines that report it."""
    lines = []
    for path in sorted(folder.glob("iter_*")):
        number = iteration_of(path)
        if number is not None and number > after and (path / INFO_FILE).is_file():
            remove(path)
            lines.append(f"deleted {path}: the run went back to iteration {after}")
    if lines:
        (folder / LATEST_CHECKPOINT_FILE).unlink(missing_ok=True)
        tidy(folder)  # rewrites the marker if a checkpoint is left
    return lines
