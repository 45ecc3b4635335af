"""Saving: at once, or in the background while training goes on."""

import contextlib
import dataclasses
import datetime
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.lm.checkpoint import content, storage
from megatron.lm.checkpoint.folder import (
    digest_entries,
    iteration_folder,
    locked,
    new_partial_folder,
    partial_folder,
    prune,
    publish,
    write_info,
)
from megatron.lm.checkpoint.plan import PLAN_FILE
from megatron.lm.checkpoint.storage import Item
from megatron.lm.training import Training

T = TypeVar("T")


def all_or_none(work: Callable[[], T], message: str = "{}", group: dist.ProcessGroup | None = None) -> T:
    """`work()` on every rank, then a meeting: where it failed on one, all raise, and none waits for the others for ever."""
    result, problem = None, None
    try:
        result = work()
    except (OSError, RuntimeError, ValueError) as error:  # torch reports a full disk as a RuntimeError
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group)
    first = next((p for p in problems if p is not None), None)
    if first is not None:
        raise ValueError(message.replace("{}", first))
    return cast("T", result)


def save(training: Training, root: Path, keep_last: int | None = None) -> Path:
    """Write the checkpoint of the current iteration, each rank its share; collective. Returns its folder.

    Args:
        training: what is saved.
        root: folder of checkpoints.
        keep_last: delete all older checkpoints but this many; None keeps all.

    Raises:
        ValueError: on every rank, where one cannot write (full disk, permissions); the last checkpoint is as it was.
    """
    folder = iteration_folder(root, training.iteration)
    _write(folder, content.items(training), content.info(training), keep_last, None)
    return folder


def _write(folder: Path, items: Sequence[Item], info: dict[str, Any], keep_last: int | None, group: dist.ProcessGroup | None) -> None:
    """`group`: whose ranks meet; None: the default one."""
    partial, rank, ranks = partial_folder(folder), dist.get_rank(), dist.get_world_size()

    def make_folder() -> None:
        if rank == 0:
            new_partial_folder(folder)

    def write() -> None:
        storage.write(partial, items, (group or dist.group.WORLD) if ranks > 1 else None)

    def digests() -> dict[str, Any]:
        # Read again from the disk: what is published is what can be read.
        return digest_entries([*partial.glob(f"__{rank}_*"), *([partial / PLAN_FILE] if rank == 0 else [])])

    def finish() -> None:
        if rank == 0:
            write_info(partial, info | {"files": {name: entry for part in parts for name, entry in part.items()}})
            publish(folder)
            if keep_last is not None:
                prune(folder.parent, keep_last)

    message = f"cannot save to {folder}: {{}}; free space or choose another --save"
    try:
        all_or_none(make_folder, message, group)
        all_or_none(write, message, group)
        own = all_or_none(digests, message, group)
        parts: list[dict[str, Any]] = [{}] * ranks
        dist.all_gather_object(parts, own, group)
        all_or_none(finish, message, group)
    except ValueError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # what was written of it fills the disk for nothing
        raise


class Saver:
    """Saves one run's checkpoints into its `--save`, which it holds against other jobs while entered.

    With `--async-save` a save copies this rank's share to the host, which training waits for, and a thread writes it while training goes
    on; the next save, and leaving, wait for the one before. A save that failed raises there, and says so at once.

    Args:
        training: what is saved.

    Raises:
        ValueError: on entering, on every rank: another job saves there, or the folder cannot be written.
    """

    def __init__(self, training: Training) -> None:
        settings = training.config.checkpoint
        assert settings.save is not None
        self.training, self.root, self.keep_last = training, Path(settings.save), settings.keep_last
        self.background = settings.async_save
        timeout = datetime.timedelta(minutes=training.config.parallel.distributed_timeout_minutes)
        apart = self.background and dist.get_world_size() > 1  # a thread's collectives must not mix with those of training
        self.group = dist.new_group(backend="gloo", timeout=timeout) if apart else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staged: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> "Saver":
        def lock() -> None:
            if dist.get_rank() == 0:
                self._lock.enter_context(locked(self.root))

        all_or_none(lock)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
            elif self._thread is not None:
                self._thread.join()  # so that a run that fails later keeps what it was writing
        finally:
            self._lock.close()

    def save(self) -> None:
        """Save the current iteration; collective.

        Raises:
            ValueError: on every rank: this save, or the one in the background before it, could not be written.
        """
        self.finish()
        folder = iteration_folder(self.root, self.training.iteration)
        items, info = content.items(self.training), content.info(self.training)
        if not self.background:
            _write(folder, items, info, self.keep_last, None)
            self._tell(folder)
            return
        items = self._stage(items)
        self._thread = threading.Thread(target=self._write_staged, args=(folder, items, info), name="save")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a save in the background is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the save in the background; ValueError where it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_staged(self, folder: Path, items: list[Item], info: dict[str, Any]) -> None:
        try:
            _write(folder, items, info, self.keep_last, self.group)
        except BaseException as error:
            self._error = error
            print(f"saving in the background failed: {error}", flush=True)
        else:
            self._tell(folder)

    def _tell(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            print(f"saved {folder}", flush=True)

    def _stage(self, items: Sequence[Item]) -> list[Item]:
        """Copies on the host, in memory that is kept from save to save: to pin gigabytes takes seconds."""
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
