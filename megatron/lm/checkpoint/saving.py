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

from megatron.lm.checkpoint import content, megatron_content
from megatron.lm.checkpoint.files import non_persistent, storage
from megatron.lm.checkpoint.files.folder import (
    condemn,
    digest_entries,
    iteration_folder,
    iteration_of,
    new_partial_folder,
    partial_folder,
    prune,
    publish,
    refuse_other_run,
    tidy,
    write_info,
)
from megatron.lm.checkpoint.files.index import PLAN_FILE
from megatron.lm.checkpoint.files.lock import FolderLock, locked
from megatron.lm.checkpoint.files.storage import Item
from megatron.lm.checkpoint.foreign import write_torch_dist
from megatron.lm.checkpoint.judging import saves as judging
from megatron.lm.checkpoint.megatron_content import MegatronContent
from megatron.lm.processes.agreement import all_or_none
from megatron.lm.training import health
from megatron.lm.training.state import Training


def save(training: Training, root: Path, keep_last: int | None = None) -> Path:
    """Write the checkpoint of the current iteration, each rank its share, and return its folder. Collective.

    Args:
        training: the training state to save.
        root: folder of checkpoints.
        keep_last: number of checkpoints to keep; None keeps all.

    Raises:
        ValueError: on every rank, if one cannot write (full disk, permissions); the last checkpoint is unchanged.
    """
    folder = iteration_folder(root, training.iteration)
    items, info, foreign = _contents(training)
    _write(folder, items, info, keep_last, foreign=foreign)
    return folder


def _contents(training: Training) -> tuple[list[Item], dict[str, Any], MegatronContent | None]:
    """Return this rank's chunks, `checkpoint.json`, and with `--ckpt-format torch_dist` Megatron-LM's other content. Collective."""
    training.optimizer.wait()  # for ZeRO's weight gathers
    items, info = content.items(training), content.info(training)
    info["health"] = training.health.entry(judging.problems(training, items, info))
    if training.config.checkpoint.ckpt_format == "own":
        return content.left_in(training, items), info, None
    foreign = megatron_content.of_training(training, items, info)
    return foreign.items, info | {"format": write_torch_dist.BACKEND}, foreign


def _write(
    folder: Path,
    items: Sequence[Item],
    info: dict[str, Any],
    keep_last: int | None,
    group: dist.ProcessGroup | None = None,
    lock: FolderLock | None = None,
    confirmed: Path | None = None,
    doubted: bool = False,
    foreign: MegatronContent | None = None,
) -> None:
    """`group`: None is the default group. `lock`: rank 0's lock on the folder of checkpoints. `confirmed`: the previous checkpoint if the
    steps since have shown that it is healthy, so that older ones can be deleted. `doubted`: whether later steps may show that this one is
    unhealthy. `foreign`: other content of a checkpoint in Megatron-LM's format, whose chunks are `items`.
    """
    partial, rank, ranks = partial_folder(folder), dist.get_rank(), dist.get_world_size()

    def make_folder() -> None:
        if lock is not None:
            lock.check()
        if rank == 0:
            if confirmed is not None and keep_last is not None and health.problem_of(info) is None:
                with contextlib.suppress(ValueError):  # it was damaged meanwhile, so keep all
                    prune(confirmed, keep_last, confirmed=True)
            new_partial_folder(folder)

    def write() -> None:
        meeting = (group or dist.group.WORLD) if ranks > 1 else None
        if foreign is None:
            storage.write(partial, items, meeting)
        else:
            write_torch_dist.write(partial, items, foreign.common, foreign.objects, meeting)

    def digests() -> dict[str, Any]:
        # Read back from disk, so that only readable files are published.
        beside = (PLAN_FILE,) if foreign is None else write_torch_dist.FILES
        return digest_entries([*partial.glob(f"__{rank}_*"), *(partial / name for name in beside if rank == 0)])

    def finish() -> None:
        if rank == 0:
            write_info(partial, info | {"files": {name: entry for part in parts for name, entry in part.items()}})
            if lock is not None:
                lock.check()
            publish(folder, mark=health.problem_of(info) is None)
            if keep_last is not None:
                prune(folder, keep_last, confirmed=not doubted)

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
            shutil.rmtree(partial, ignore_errors=True)  # free the disk space of the incomplete checkpoint
        raise


@dataclasses.dataclass
class _Root:
    """A folder in which a run saves.

    Attributes:
        folder: of its checkpoints.
        keep_last: as `--keep-last`.
        lock: rank 0's, while the `Saver` is active.
        newest: the newest checkpoint, if it is healthy and this process saved it.
    """

    folder: Path
    keep_last: int | None
    lock: FolderLock | None = None
    newest: Path | None = None


class _Elsewhere(NamedTuple):
    """A folder in or at `--emergency-save`, rank 0's lock on it, and why it is not `--emergency-save` itself, as the end of a sentence."""

    folder: Path
    lock: FolderLock | None
    why: str = ""


class Saver:
    """Context manager that saves a run's checkpoints to `--save`, and locks this folder against other jobs.

    With `--non-persistent-save-interval` it also locks that folder, and keeps only the newest checkpoint there. If the run has gone back to
    an earlier iteration, later non-persistent checkpoints are deleted on entry and by `forget_undone`.

    If a save fails, because the disk is full or the folder was removed, the checkpoint goes to `--emergency-save` if set, and the error is
    raised in any case. Several runs may share that folder: the first to need it writes there, and each other into `run_ID` in it.

    With `--async-save` a save copies this rank's share to the host, for which training waits, and a thread writes it while training
    continues. The next save, and the exit, wait for the previous one. A failed save is reported at once and raises there.

    With `--keep-last 1` the previous checkpoint is deleted when the next save starts, not when the newest is complete: the steps in between
    may show that the newest is unhealthy.

    Args:
        training: the training state to save.

    Raises:
        ValueError: on entry, on every rank, if another job saves there, the folder contains another run, or it cannot be written.
    """

    def __init__(self, training: Training) -> None:
        settings = training.config.checkpoint
        assert settings.save is not None
        if settings.ckpt_format != "own":
            megatron_content.check_states(training)
        self.training, self.root = training, _Root(Path(settings.save), settings.keep_last)
        beside = non_persistent.folder_of(settings, settings.save)
        self.non_persistent = None if beside is None else _Root(beside, 1)
        self.elsewhere = Path(settings.emergency_save) if settings.emergency_save else None
        self.background = settings.async_save
        timeout = datetime.timedelta(minutes=training.config.parallel.distributed_timeout_minutes)
        apart = self.background and dist.get_world_size() > 1  # the thread's collectives need their own group
        self.group = dist.new_group(backend="gloo", timeout=timeout) if apart else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staged: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "Saver":
        def lock() -> None:
            if dist.get_rank() == 0:
                for root in self._roots:
                    root.lock = self._held.enter_context(locked(root.folder))
                    refuse_other_run(root.folder, self.training.run)
                for root in self._roots:
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

    @property
    def _roots(self) -> tuple[_Root, ...]:
        return (self.root,) if self.non_persistent is None else (self.root, self.non_persistent)

    def forget_undone(self) -> None:
        """Delete the non-persistent checkpoints of undone iterations; waits for a background save. Collective.

        Raises:
            ValueError: on every rank, if they cannot be deleted, or the background save failed.
        """
        self.finish()

        def forget() -> None:
            if self.non_persistent is not None and self.non_persistent.lock is not None:
                self.non_persistent.lock.check()
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
        folder = iteration_folder(root.folder, self.training.iteration)
        items, info, foreign = _contents(self.training)
        stepped = root.newest is not None and (iteration_of(root.newest) or 0) < self.training.iteration  # since the newest was saved
        confirmed = root.newest if stepped and self.training.health.failed == 0 else None
        root.newest = folder if health.problem_of(info) is None else None
        if self.background:
            self._thread = threading.Thread(
                target=self._write_staged, args=(root, folder, self._stage(items), info, confirmed, foreign), name="save"
            )
            self._thread.start()
        else:
            self._write(root, folder, items, info, confirmed, foreign)
        return health.problem_of(info) is None

    def doubt(self, saved: int) -> bool:
        """Mark the checkpoint of iteration `saved` as unhealthy if the steps since show that it is; return whether they do. Collective.

        Raises:
            ValueError: on every rank, if the mark cannot be written.
        """
        return self._doubt(self.root, saved)

    def doubt_non_persistent(self) -> bool:
        """Like `doubt`, for the newest non-persistent checkpoint that this process saved; False if there is none."""
        root = self.non_persistent
        return root is not None and root.newest is not None and self._doubt(root, iteration_of(root.newest) or 0)

    def _doubt(self, root: _Root, saved: int) -> bool:
        problem = self.training.health.against(saved)
        if problem is None:
            return False
        self.finish()
        root.newest = None
        folder = iteration_folder(root.folder, saved)

        def write() -> None:
            if root.lock is not None:  # on rank 0
                root.lock.check()
                print(f"{folder} is unhealthy: {problem}; the newest healthy one is {condemn(folder, problem) or 'none'}", flush=True)

        all_or_none(write, f"{folder} is unhealthy, but cannot be marked as such: {{}}")
        return True

    @property
    def busy(self) -> bool:
        """Return whether a background save is still running."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the background save; raise a ValueError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_staged(
        self, root: _Root, folder: Path, items: list[Item], info: dict[str, Any], confirmed: Path | None, foreign: MegatronContent | None
    ) -> None:
        try:
            self._write(root, folder, items, info, confirmed, foreign)
        except BaseException as error:
            self._error = error
            print(f"background save failed: {error}", flush=True)

    def _write(
        self,
        root: _Root,
        folder: Path,
        items: Sequence[Item],
        info: dict[str, Any],
        confirmed: Path | None,
        foreign: MegatronContent | None,
    ) -> None:
        problem = health.problem_of(info)
        try:
            _write(folder, items, info, root.keep_last, self.group, root.lock, confirmed, doubted=True, foreign=foreign)
        except ValueError as error:
            if self.elsewhere is None:
                raise
            with contextlib.ExitStack() as held:
                try:
                    place = self._free_elsewhere(held)
                    other = place.folder / folder.name
                    _write(other, items, info, None, self.group, place.lock, foreign=foreign)
                except ValueError as second:
                    raise ValueError(f"{error}; and {second}") from None
            unhealthy = "" if problem is None else f", and is unhealthy: {problem}"
            raise ValueError(f"{error}. The checkpoint was saved to {other} instead{place.why}{unhealthy}") from None
        if dist.get_rank() == 0:
            print(f"saved {folder}" if problem is None else f"saved {folder}, which is unhealthy: {problem}", flush=True)

    def _free_elsewhere(self, held: contextlib.ExitStack) -> "_Elsewhere":
        """Lock `--emergency-save`, or a folder of this run in it if another run writes or has written there. Collective.

        Other runs may have the same flag, and write there at any time, so this is judged when it is needed and not at the start.

        Raises:
            ValueError: on every rank, if neither can be written.
        """
        assert self.elsewhere is not None
        shared, run = self.elsewhere, self.training.run

        def choose() -> _Elsewhere | None:
            if dist.get_rank() != 0:
                return None
            try:
                lock = held.enter_context(locked(shared, "--emergency-save"))
                refuse_other_run(shared, run)
                return _Elsewhere(shared, lock)
            except ValueError as problem:
                held.close()
                own = shared / f"run_{run.id[:12]}"
                lock = held.enter_context(locked(own, "--emergency-save"))
                refuse_other_run(own, run)
                return _Elsewhere(own, lock, f", since {str(problem).partition('; ')[0].partition(', and saving')[0]}")

        place = all_or_none(choose, group=self.group)
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, None if place is None else (place.folder, place.why), self.group)
        return place or _Elsewhere(answers[0][0], None, answers[0][1])

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
