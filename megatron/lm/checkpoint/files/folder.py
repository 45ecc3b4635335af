"""Folders of checkpoints: their names, the choice of the checkpoint to load, and atomic creation and deletion.

    ROOT/iter_0000100/           a checkpoint: a data file per rank, `plan.json`, and `checkpoint.json` written last
    ROOT/iter_0000200.partial/   a checkpoint that is being written, or what a killed save left
    ROOT/latest_checkpointed_iteration.txt

`checkpoint.json` contains the non-tensor values, size and SHA-256 of every other file, and a seal over itself.

The marker file names the newest healthy checkpoint (`training.run_record`). Users can edit it to go back. If the marked checkpoint
is damaged, the next older healthy one of the same run is loaded; if the marker is missing or unreadable,
the newest one.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.checkpoint.files.versions import files_of, upgraded
from megatron.lm.config import LATEST_CHECKPOINT_FILE
from megatron.lm.shell.files import flush, read_text, to_write, written_aside
from megatron.lm.training.run_record import Run, health_problem, run_name, run_of

INFO_FILE, LOCK_FILE = "checkpoint.json", ".lock"
RELEASE = "release"
_NAME = re.compile(r"iter_(\d{7,})(\.replaced)?")


def iteration_folder(root: Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint, named as in Megatron-LM."""
    return root / f"iter_{iteration:07d}"


def partial_folder(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written until it is complete."""
    return folder.with_name(folder.name + ".partial")


def iteration_of(folder: Path) -> int | None:
    """Return the iteration in a folder's name; None for other names."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def marked_iteration(root: Path) -> int | None:
    """Return the iteration in the marker file; None if the file is missing or invalid."""
    try:
        return int(read_text(root / LATEST_CHECKPOINT_FILE).strip())
    except (OSError, ValueError):
        return None


def exists(root: Path) -> bool:
    """Return whether `root` contains checkpoints, complete or not, of any program, or only the marker."""
    return (root / LATEST_CHECKPOINT_FILE).is_file() or any(_numbered(root))


def _numbered(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield iteration and folder of all entries with the name of a checkpoint."""
    if root.is_dir():
        for path in root.iterdir():
            number = iteration_of(path)
            if number is not None and path.is_dir():
                yield number, path


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_entries(files: Iterable[Path]) -> dict[str, Any]:
    """Return size and SHA-256 of files as read back from disk: the entry `files` of `checkpoint.json`."""
    return {file.name: {"bytes": file.stat().st_size, "sha256": file_digest(file)} for file in sorted(files)}


def new_partial_folder(folder: Path) -> Path:
    """Create an empty folder for a checkpoint, deleting files of a killed save."""
    partial = partial_folder(folder)
    _delete(partial)
    partial.mkdir(parents=True)
    return partial


def write_info(folder: Path, info: dict[str, Any]) -> None:
    """Write `checkpoint.json` with its seal and sync it, which completes the checkpoint."""
    file = folder / INFO_FILE
    with to_write(file, "wb") as stream:
        stream.write(json.dumps(info | {"seal": _seal(info)}, indent=1).encode())
        stream.flush()
        os.fsync(stream.fileno())
    flush(folder)


def read_info(folder: Path) -> dict[str, Any]:
    """Return the content of `checkpoint.json`, with an older version's settings converted to the current ones (`versions`).

    Raises:
        ValueError: with the reason, if the folder is not a complete checkpoint of a supported version, or its name has another iteration.
            `check_files` checks file contents.
    """
    info, file, number = sealed_info(folder), folder / INFO_FILE, iteration_of(folder)
    if number is not None and info.get("iteration") != number:
        raise ValueError(f"{folder} contains iteration {info.get('iteration')}: the folder was renamed; restore its name")
    for name, entry in info["files"].items():
        path = folder / name
        if Path(name).name != name:
            raise ValueError(f"{file} names {name!r}, which is outside its folder")
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            raise ValueError(f"{path} is {'missing' if size is None else f'{size} bytes long'}; expected {entry['bytes']} bytes")
    return info


def sealed_info(folder: Path) -> dict[str, Any]:
    """Like `read_info`, without checking the other files and the folder's name."""
    file = folder / INFO_FILE
    if not file.is_file():
        raise ValueError(f"{folder} {_what_it_is(folder)}")
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error})") from None
    if not isinstance(info, dict) or info.get("seal") != _seal({key: value for key, value in info.items() if key != "seal"}):
        raise ValueError(f"{file} is damaged: its seal does not match its contents")
    try:
        info = upgraded(info)
        files_of(info)
    except ValueError as problem:
        raise ValueError(f"{folder} {problem}") from None
    return info


def check_files(folder: Path, files: dict[str, Any]) -> None:
    """Raise a ValueError for the first of `files` (entries of `checkpoint.json`) whose contents have changed since it was written."""
    for name, entry in files.items():
        if file_digest(folder / name) != entry["sha256"]:
            raise ValueError(f"{folder / name} is damaged: its SHA-256 is not that in {INFO_FILE}")


def _seal(info: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()


def is_torch_dist(folder: Path) -> bool:
    """Return whether Megatron-LM's distributed checkpointing wrote the folder; from megatron-core 0.19 on without `common.pt`."""
    return (folder / "metadata.json").is_file() and any((folder / name).is_file() for name in ("common.pt", ".metadata"))


def _what_it_is(folder: Path) -> str:
    if not folder.is_dir():
        return "is missing"
    if (folder / "mp_rank_00_000.pt").is_file() or (folder / "state.pt").is_file():
        return f"was written by an earlier version of this code (it has no {INFO_FILE}); read it with the version that wrote it"
    if is_torch_dist(folder):
        return "was written by Megatron-LM as torch_dist, which the trainer can read: use it as --load, with another --save"
    if any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        return "was written by Megatron-LM as --ckpt-format torch: save it there as torch_dist, or convert it through Hugging Face's format"
    return f"is not a checkpoint, or has no {INFO_FILE}, which is written last"


class Candidates(NamedTuple):
    """Folders of checkpoints to try to load, best first, and remarks on the others."""

    folders: list[Path]
    remarks: list[str]


def candidates(root: Path, iteration: int | None = None, *, unhealthy: bool = False) -> Candidates:
    """Return the checkpoints to try to load from `root`: the marked one, then older ones, newest first, without unhealthy ones and those of
    other runs. They include unreadable ones, so that loading them reports the error.

    Args:
        root: folder of checkpoints.
        iteration: return only this one.
        unhealthy: include unhealthy ones.
    """
    marker = root / LATEST_CHECKPOINT_FILE
    if iteration is None and (root / RELEASE).is_dir():  # of Megatron-LM: weights without an iteration
        with contextlib.suppress(OSError, ValueError):
            if read_text(marker).strip() == RELEASE:
                return Candidates([root / RELEASE], [])
    marked = marked_iteration(root) if iteration is None else iteration
    # A replaced checkpoint is next to, or for a moment at the path of, the one that was saved over it.
    by_iteration = sorted(_numbered(root), key=lambda pair: (-pair[0], pair[1].name))
    offered = [(n, path) for n, path in by_iteration if (n == iteration if iteration is not None else marked is None or n <= marked)]
    remarks: list[str] = []
    if marked is None and by_iteration:
        remarks.append(f"{marker} is missing or invalid: using the newest healthy checkpoint")
    newer = sorted({number for number, _ in by_iteration} - {number for number, _ in offered}) if iteration is None else []
    if newer:
        remarks.append(
            f"{marker} names iteration {marked}: newer ones, {', '.join(map(str, newer))}, are ignored (choose one with --ckpt-step)"
        )
    folders: list[Path] = []
    if marked is not None and root.is_dir() and (iteration is None or offered) and marked not in dict(offered):
        folders.append(iteration_folder(root, marked))  # so that loading it reports that it is missing
    judged = _judged(offered, unhealthy)
    return Candidates([*folders, *judged.folders], [*remarks, *judged.remarks])


def _judged(offered: Sequence[tuple[int, Path]], unhealthy: bool) -> Candidates:
    """Return the checkpoints of one run that are healthy or unreadable, and why the others are skipped."""
    folders, remarks = [], []
    first: dict[str, Any] | None = None
    for number, path in offered:
        try:
            info = sealed_info(path)
        except ValueError:
            folders.append(path)
            continue
        problem = health_problem(info)
        if first is not None and not one_run(first, info):
            remarks.append(f"passed over: {path} is a checkpoint of another run")
        elif problem is not None and not unhealthy:
            remarks.append(f"passed over: {path} is unhealthy: {problem} (--ckpt-step {number} --load-unhealthy loads it)")
        else:
            folders.append(path)
        first = first or info
    return Candidates(folders, remarks)


def one_run(newer: dict[str, Any], older: dict[str, Any]) -> bool:
    """Return whether two checkpoints are of the same run, from their `checkpoint.json`."""
    run = run_of(newer)
    return run_of(older) is None if run is None else run.holds(older)


def owner(root: Path) -> dict[str, Any] | None:
    """Return `checkpoint.json` of the checkpoint that identifies the run in `root`: the marked one, else the newest readable one."""
    marked = marked_iteration(root)
    for _, path in sorted(_numbered(root), key=lambda pair: (pair[0] == marked, pair[0]), reverse=True):
        try:
            return sealed_info(path)
        except ValueError:
            continue
    return None


def refuse_other_run(root: Path, run: Run) -> None:
    """Raise a ValueError, with alternatives, if `root` contains checkpoints of another run than `run`."""
    info = owner(root)
    if any(_numbered(root)) and (info is None or not run.holds(info)):
        held = f"another run (iteration {info['iteration']} of {run_name(info)[:8]})" if info else "checkpoints that cannot be read"
        if info is None and any(is_torch_dist(path) for _, path in _numbered(root)):
            raise ValueError(
                f"{root} contains checkpoints of Megatron-LM, which saving there would lose: use --load {root} and another --save"
            )
        raise ValueError(
            f"{root} contains {held}, and saving there would lose it: use --load {root} --save {root} to resume it, another "
            "--save to keep both, or move it away"
        )


def latest(root: Path, iteration: int | None = None, *, unhealthy: bool = False, say: bool = True) -> Path:
    """Return the first of `candidates` that looks complete: its files exist with the right sizes.

    With `say`, print which ones it skipped, and why.

    Raises:
        ValueError: if there is none, with the problem of each, and a fix.
    """
    folder, passed_over = first_complete(root, iteration, candidates(root, iteration, unhealthy=unhealthy))
    for text in passed_over if say else ():
        print(text, flush=True)
    return folder


def first_complete(root: Path, iteration: int | None, offered: Candidates) -> tuple[Path, list[str]]:
    """Return the first candidate that looks complete, and a line on each that was passed over.

    Raises:
        ValueError: if there is none, with these lines and a fix for `root`.
    """
    lines = [*offered.remarks]
    for folder in offered.folders:
        try:
            read_info(folder)
        except ValueError as problem:
            lines.append(f"passed over: {problem}")
            continue
        return folder, lines
    raise no_checkpoint(root, iteration, lines)


def no_checkpoint(root: Path, iteration: int | None, remarks: list[str]) -> ValueError:
    """Return the error to raise if no checkpoint of `candidates` can be loaded, with the remarks on each."""
    held = ", ".join(str(number) for number in sorted({number for number, _ in _numbered(root)}))
    if remarks:
        problems = "; ".join(text.removeprefix("passed over: ") for text in remarks)
        return ValueError(f"{root} has no complete healthy checkpoint: {problems}. Restore one, or choose another --load")
    if held:
        return ValueError(f"{root} has no checkpoint of iteration {iteration}; it has iterations {held} (choose one with --ckpt-step)")
    return ValueError(f"{root} holds no checkpoint: set --load to the folder of an earlier --save")


def publish(folder: Path, *, mark: bool = True) -> None:
    """Rename a complete `.partial` folder to `folder`, then move the marker to it unless it is unhealthy (`mark`). There is a complete
    checkpoint at every moment.
    """
    aside = folder.with_name(folder.name + ".replaced")
    if folder.exists():  # a restarted run has saved this iteration before
        _delete(aside)
        folder.rename(aside)
    partial_folder(folder).rename(folder)
    flush(folder.parent)
    if mark:
        _mark(folder)
    remove(aside)


def _mark(folder: Path) -> None:
    """Write the iteration of a checkpoint to the marker."""
    with written_aside(folder.with_name(LATEST_CHECKPOINT_FILE)) as stream:
        stream.write(str(iteration_of(folder)).encode())


def remove(folder: Path) -> None:
    """Delete a checkpoint; a kill in between leaves nothing that looks complete."""
    if folder.exists():
        _delete(partial_folder(folder))
        _delete(folder.rename(partial_folder(folder)))


def _delete(folder: Path) -> None:
    """Delete a folder with its contents; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def prune(newest: Path, keep: int) -> None:
    """Delete the checkpoints of a run up to `newest`, the last it saved, except for the last `keep` and the newest healthy one."""
    last = sealed_info(newest)
    checkpoints: list[tuple[int, bool, bool, Path]] = []  # iteration, not a replaced one, healthy
    for number, path in _numbered(newest.parent):
        if number > (iteration_of(newest) or 0) or not (path / INFO_FILE).is_file():  # keeps what others have put here
            continue
        try:
            info: dict[str, Any] | None = read_info(path)
        except ValueError:
            info = None
        if info is None or one_run(last, info):
            checkpoints.append((number, path.suffix == "", info is not None and health_problem(info) is None, path))
    checkpoints.sort()
    newest_healthy = [path for _, _, is_healthy, path in checkpoints if is_healthy][-1:]
    for *_, path in checkpoints[:-keep]:
        if path not in newest_healthy:
            remove(path)


def tidy(root: Path) -> list[str]:
    """Clean up a folder that this job has locked: delete what killed saves left, and rewrite a missing or unreadable marker. Return lines
    that report it.
    """
    said = []
    for path in sorted(root.glob("iter_*.partial")):
        if iteration_of(path.with_suffix("")) is not None:
            _delete(path)
            said.append(f"deleted {path} of an interrupted save")
    if marked_iteration(root) is None:
        try:
            folder = latest(root, say=False)
        except ValueError:  # unreadable, so the marker cannot name it
            return said
        _mark(folder)
        said.append(f"rewrote {root / LATEST_CHECKPOINT_FILE} with iteration {iteration_of(folder)}")
    return said


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Lock a folder of checkpoints against other jobs during the block; a kill releases the lock too.

    Raises:
        ValueError: if another job saves there, with its host and process; or if the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        stream = to_write(root / LOCK_FILE)
    except OSError as error:
        raise ValueError(f"--save {root} cannot be written ({error.strerror}): choose another folder, or change its permissions") from None
    with stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not inherited by data loader forks, which outlive a kill
        except BlockingIOError:
            holder = stream.read().decode("utf-8", "replace") or "another job"
            raise ValueError(
                f"--save {root} is in use by {holder}; two jobs in one folder would lose checkpoints: stop it, or choose another --save"
            ) from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
