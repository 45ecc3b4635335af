"""Save checkpoints, synchronously or in the background while training continues."""

import contextlib
import dataclasses
import datetime
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.lm.checkpoint import content, megatron_content, tensor_rules
from megatron.lm.checkpoint.files import non_persistent, storage
from megatron.lm.checkpoint.files.folder import (
    digest_entries,
    iteration_folder,
    locked,
    new_partial_folder,
    partial_folder,
    prune,
    publish,
    refuse_other_run,
    tidy,
    write_info,
)
from megatron.lm.checkpoint.files.index import PLAN_FILE
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.foreign import write_torch_dist
from megatron.lm.checkpoint.megatron_content import MegatronContent
from megatron.lm.processes.agreement import all_or_none
from megatron.lm.shell.files import full_disk
from megatron.lm.training.run_record import health_problem
from megatron.lm.training.state import Training

NAMED = 3  # problems that `checkpoint.json` names at most


class CheckpointRoot(NamedTuple):
    """A folder in which a run saves; `keep_last` as the flag."""

    folder: Path
    keep_last: int | None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a rank is about to write: its chunks, `checkpoint.json` without its files, and with `--ckpt-format torch_dist` Megatron-LM's
    other content."""

    items: Sequence[Item]
    info: dict[str, Any]
    foreign: MegatronContent | None

    @classmethod
    def of(cls, training: Training) -> "Snapshot":
        """Return the snapshot of the current iteration. Collective."""
        training.optimizer.wait()  # for ZeRO's weight gathers
        items, info = content.items(training), content.info(training)
        problems = tensor_rules.problems(training, items)
        more = [f"and {len(problems) - NAMED} more"] if len(problems) > NAMED else []
        info["health"] = {"problem": "; ".join([*problems[:NAMED], *more]) if problems else training.problem}
        if training.config.checkpoint.ckpt_format == "own":
            return cls(content.left_in(training, items), info, None)
        foreign = megatron_content.of_training(training, items, info)
        return cls(foreign.items, info | {"format": write_torch_dist.BACKEND}, foreign)

    def write(self, root: CheckpointRoot, group: dist.ProcessGroup | None = None) -> Path:
        """Write the checkpoint of all ranks, and return its folder: in a partial folder, which is renamed when it is complete. Collective.

        `group`: None is the default group.

        Raises:
            ValueError: on every rank, if one cannot write; the last checkpoint is unchanged.
        """
        folder = iteration_folder(root.folder, self.info["iteration"])
        partial, rank, ranks = partial_folder(folder), dist.get_rank(), dist.get_world_size()

        def make_folder() -> None:
            if rank == 0:
                new_partial_folder(folder)

        def write() -> dict[str, Any]:
            meeting = (group or dist.group.WORLD) if ranks > 1 else None
            try:
                if self.foreign is None:
                    storage.write(partial, self.items, meeting)
                else:
                    write_torch_dist.write(partial, self.items, self.foreign.common, self.foreign.objects, meeting)
            except (OSError, RuntimeError, ValueError) as error:
                raise ValueError(full_disk(error, partial) or str(error)) from None
            # Read back from disk, so that only readable files are published.
            beside = (PLAN_FILE,) if self.foreign is None else write_torch_dist.FILES
            return digest_entries([*partial.glob(f"__{rank}_*"), *(partial / name for name in beside if rank == 0)])

        def finish() -> None:
            if rank == 0:
                write_info(partial, self.info | {"files": {name: entry for part in parts for name, entry in part.items()}})
                publish(folder, mark=health_problem(self.info) is None)
                if root.keep_last is not None:
                    prune(folder, root.keep_last)

        message = f"cannot save to {folder}: {{}}; free space or choose another --save"
        try:
            all_or_none(make_folder, message, group)
            own = all_or_none(write, message, group)
            parts: list[dict[str, Any]] = [{}] * ranks
            dist.all_gather_object(parts, own, group)
            all_or_none(finish, message, group)
        except ValueError:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # free the disk space of the incomplete checkpoint
            raise
        return folder


def save(training: Training, root: Path, keep_last: int | None = None) -> Path:
    """Write the checkpoint of the current iteration, each rank its share, and return its folder. Collective.

    Args:
        training: the training state to save.
        root: folder of checkpoints.
        keep_last: number of checkpoints to keep; None keeps all.

    Raises:
        ValueError: on every rank, if one cannot write (full disk, permissions); the last checkpoint is unchanged.
    """
    return Snapshot.of(training).write(CheckpointRoot(root, keep_last))


class Saver:
    """Context manager that saves a run's checkpoints to `--save`, and locks this folder against other jobs.

    With `--non-persistent-save-interval` it also locks that folder, and keeps only the newest checkpoint there. If the run has gone back to
    an earlier iteration, later non-persistent checkpoints are deleted on entry and by `forget_undone`.

    With `--async-save` a save copies this rank's share to the host, for which training waits, and a thread writes it while training
    continues. The next save, and the exit, wait for the previous one. A failed save is reported at once and raises there.

    Raises:
        ValueError: on entry, on every rank, if another job saves there, the folder contains another run, or it cannot be written.
    """

    def __init__(self, training: Training) -> None:
        settings = training.config.checkpoint
        assert settings.save is not None
        if settings.ckpt_format != "own":
            megatron_content.check_states(training)
        self.training, self.root = training, CheckpointRoot(Path(settings.save), settings.keep_last)
        beside = non_persistent.folder_of(settings, settings.save)
        self.non_persistent = None if beside is None else CheckpointRoot(beside, 1)
        self.background = settings.async_save
        timeout = datetime.timedelta(minutes=training.config.parallel.distributed_timeout_minutes)
        apart = self.background and dist.get_world_size() > 1  # the thread's collectives need their own group
        self.group = dist.new_group(backend="gloo", timeout=timeout) if apart else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staged: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "Saver":
        roots = [root for root in (self.root, self.non_persistent) if root is not None]

        def lock() -> None:
            if dist.get_rank() == 0:
                for root in roots:
                    self._held.enter_context(locked(root.folder))
                    refuse_other_run(root.folder, self.training.run)
                for root in roots:
                    for line in tidy(root.folder):
                        print(line, flush=True)

        try:
            all_or_none(lock)
            self.forget_undone()
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
            elif self._thread is not None:
                self._thread.join()  # so that a run that fails later still completes its checkpoint
        finally:
            self._held.close()

    def forget_undone(self) -> None:
        """Delete the non-persistent checkpoints of undone iterations; waits for a background save. Collective.

        Raises:
            ValueError: on every rank, if they cannot be deleted, or the background save failed.
        """
        self.finish()

        def forget() -> None:
            if self.non_persistent is not None and dist.get_rank() == 0:
                for line in non_persistent.forget(self.non_persistent.folder, self.training.iteration):
                    print(line, flush=True)

        all_or_none(forget)

    def save(self, *, persistent: bool = True) -> bool:
        """Save the current iteration, and return whether it is healthy. Collective.

        Args:
            persistent: save to `--save`, or else to the folder of `--non-persistent-save-interval`.

        Raises:
            ValueError: on every rank, if this save or the previous background save could not be written.
        """
        self.finish()
        root = self.root if persistent else self.non_persistent
        assert root is not None
        snapshot = Snapshot.of(self.training)
        if self.background:
            staged = dataclasses.replace(snapshot, items=self._stage(snapshot.items))
            self._thread = threading.Thread(target=self._write_in_background, args=(root, staged), name="save")
            self._thread.start()
        else:
            self._write(root, snapshot)
        return health_problem(snapshot.info) is None

    def finish(self) -> None:
        """Wait for the background save; raise a ValueError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_in_background(self, root: CheckpointRoot, snapshot: Snapshot) -> None:
        try:
            self._write(root, snapshot)
        except BaseException as error:
            self._error = error
            print(f"background save failed: {error}", flush=True)

    def _write(self, root: CheckpointRoot, snapshot: Snapshot) -> None:
        folder, problem = snapshot.write(root, self.group), health_problem(snapshot.info)
        if dist.get_rank() == 0:
            print(f"saved {folder}" if problem is None else f"saved {folder}, which is unhealthy: {problem}", flush=True)

    def _stage(self, items: Sequence[Item]) -> list[Item]:
        """Copy items to host memory that is reused by later saves, because pinning gigabytes takes seconds."""
        staged = []
        for item in items:
            key = (item.key, item.offset)
            copy, on_gpu = self._staged.get(key), item.tensor.is_cuda
            if copy is None or copy.shape != item.tensor.shape or copy.dtype != item.tensor.dtype:
                copy = self._staged[key] = torch.empty(item.tensor.shape, dtype=item.tensor.dtype, pin_memory=on_gpu)
            copy.copy_(item.tensor, non_blocking=on_gpu)
            staged.append(dataclasses.replace(item, tensor=copy))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return staged
