"""Checkpoints on disk: the names in a folder of checkpoints, which of them is whole, and how one comes and goes at a stroke.

    ROOT/iter_0000100/           a checkpoint: a data file of each rank, `plan.json`, and `checkpoint.json` written last
    ROOT/iter_0000200.partial/   one that is being written, or that a kill has left
    ROOT/latest_checkpointed_iteration.txt

`checkpoint.json` holds what is not a tensor, the size and the SHA-256 of every other file, and a seal over itself.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron.lm.checkpoint.versions import upgraded
from megatron.lm.config import LATEST_CHECKPOINT_FILE

INFO_FILE = "checkpoint.json"
LOCK_FILE = ".lock"
_NAME = re.compile(r"iter_(\d{7,})(\.replaced)?")
_BLOCK = 2**22


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration stands, in Megatron-LM's spelling."""
    return root / f"iter_{iteration:07d}"


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder.with_name(folder.name + ".partial")


def iteration_of(folder: Path) -> int | None:
    """The iteration that a folder of this name holds; None for other names."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def marked_iteration(root: Path) -> int | None:
    """What the marker file names; None where it is missing or names no iteration."""
    try:
        return int((root / LATEST_CHECKPOINT_FILE).read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return None


def exists(root: Path) -> bool:
    """Whether a run has published a checkpoint in `root`."""
    return (root / LATEST_CHECKPOINT_FILE).is_file()


def file_digest(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def digest_entries(files: Iterable[Path]) -> dict[str, Any]:
    """Size and SHA-256 of files as the disk gives them back: the entry `files` of `checkpoint.json`."""
    return {file.name: {"bytes": file.stat().st_size, "sha256": file_digest(file)} for file in sorted(files)}


def new_partial_folder(folder: Path) -> Path:
    """An empty folder to write a checkpoint in, without what a kill has left in it."""
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def write_info(folder: Path, info: dict[str, Any]) -> None:
    """Write `checkpoint.json` and its seal through to the disk: from here on the folder is whole."""
    file = folder / INFO_FILE
    with file.open("w", encoding="utf-8") as stream:
        json.dump(info | {"seal": _seal(info)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(folder)


def read_info(folder: Path) -> dict[str, Any]:
    """What `checkpoint.json` of a checkpoint holds, one of an older version in the settings of today (`versions`).

    Raises:
        ValueError: the folder is not a whole checkpoint of a version that is read, saying why. File contents are judged by `check_files`.
    """
    file = folder / INFO_FILE
    if not file.is_file():
        raise ValueError(f"{folder} {_what_it_is(folder)}")
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error})") from None
    if not isinstance(info, dict) or info.get("seal") != _seal({key: value for key, value in info.items() if key != "seal"}):
        raise ValueError(f"{file} is damaged: its seal does not fit its contents")
    try:
        info = upgraded(info)
    except ValueError as problem:
        raise ValueError(f"{folder} {problem}") from None
    for name, entry in info["files"].items():
        path = folder / name
        if Path(name).name != name:
            raise ValueError(f"{file} names {name!r}, which is outside its folder")
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            raise ValueError(f"{path} is {'missing' if size is None else f'{size} bytes long'}; it should be {entry['bytes']} bytes long")
    return info


def check_files(folder: Path, files: dict[str, Any]) -> None:
    """ValueError naming the first of the `files` (entries of `checkpoint.json`) whose contents are not those that were written."""
    for name, entry in files.items():
        if file_digest(folder / name) != entry["sha256"]:
            raise ValueError(f"{folder / name} is damaged: its SHA-256 is not that in {INFO_FILE}")


def _seal(info: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()


def _what_it_is(folder: Path) -> str:
    if not folder.is_dir():
        return "is missing"
    if (folder / "mp_rank_00_000.pt").is_file() or (folder / "state.pt").is_file():
        return f"was written by an earlier version of this code (it has no {INFO_FILE}); read it with the code of then"
    if (folder / "common.pt").is_file() or any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        return "was written by Megatron-LM, whose optimizer states are others; take its weights through Hugging Face's format"
    return f"is no checkpoint, or one without {INFO_FILE}, which is written last"


def candidates(root: Path, iteration: int | None = None) -> Iterator[Path]:
    """Folders that may hold the checkpoint to load, best first: the marked one, then those older than it from the newest down.

    `iteration`: only that one. A checkpoint newer than the marked one is not offered: the marker moves last of all.
    """
    marked = iteration if iteration is not None else marked_iteration(root)
    if marked is None or not root.is_dir():
        return
    found = [(number, path) for path in root.iterdir() if path.is_dir() and (number := iteration_of(path)) is not None]
    offered = [(number, path) for number, path in found if number == marked or (iteration is None and number < marked)]
    if offered and max(offered)[0] != marked:
        yield iteration_folder(root, marked)  # so that its reader says that it is missing
    # A replaced one stands beside, or for a moment in the place of, the one that was saved over it.
    for _, path in sorted(offered, key=lambda pair: (-pair[0], pair[1].name)):
        yield path


def latest(root: Path, iteration: int | None = None) -> Path:
    """The newest checkpoint in `root` that looks whole (its files are there and of their size), or that of `iteration`.

    Says on stdout which newer ones it passed over, and why.

    Raises:
        ValueError: there is none; what is wrong with each, and what to do.
    """
    problems = []
    for folder in candidates(root, iteration):
        try:
            read_info(folder)
        except ValueError as problem:
            problems.append(str(problem))
            continue
        for text in problems:
            print(f"passed over: {text}", flush=True)
        return folder
    raise no_checkpoint(root, iteration, problems)


def no_checkpoint(root: Path, iteration: int | None, problems: list[str]) -> ValueError:
    """The error to raise where no checkpoint of `candidates` is whole, with what is wrong with each."""
    marker, marked = root / LATEST_CHECKPOINT_FILE, marked_iteration(root)
    if problems:
        return ValueError(f"{root} holds no whole checkpoint: {'; '.join(problems)}. Restore one, or name another folder by --load")
    if iteration is not None:
        return ValueError(f"{root} holds no checkpoint of iteration {iteration}; it holds {_held(root)}")
    if marked is None:
        return ValueError(f"{root} holds no checkpoint: {marker} is missing or names no iteration; give the folder of an earlier --save")
    return ValueError(f"{marker} names iteration {marked}, which is missing; {root} holds {_held(root)}")


def _held(root: Path) -> str:
    numbers = sorted({number for path in root.iterdir() if (number := iteration_of(path)) is not None}) if root.is_dir() else []
    return f"iterations {', '.join(map(str, numbers))} (name one by --ckpt-step)" if numbers else "none"


def sync_folder(folder: Path) -> None:
    """Write the names in a folder through to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path) -> None:
    """Bring a finished `.partial` folder to its name `folder`, then move the marker; at every moment a whole checkpoint can be found."""
    root = folder.parent
    aside = folder.with_name(folder.name + ".replaced")
    if folder.exists():  # a run that was started again has come by here before
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    partial_folder(folder).rename(folder)
    sync_folder(root)
    marker = root / (LATEST_CHECKPOINT_FILE + ".partial")
    with marker.open("w", encoding="utf-8") as stream:
        stream.write(str(iteration_of(folder)))
        stream.flush()
        os.fsync(stream.fileno())
    marker.rename(root / LATEST_CHECKPOINT_FILE)
    sync_folder(root)
    remove(aside)


def remove(folder: Path) -> None:
    """Delete a checkpoint so that a kill in between leaves nothing that looks whole."""
    if folder.exists():
        shutil.rmtree(partial_folder(folder), ignore_errors=True)
        shutil.rmtree(folder.rename(partial_folder(folder)), ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints up to the marked one, and what kills have left of others up to there."""
    marked = marked_iteration(root)
    if marked is None:
        return
    whole, torn = [], []
    for path in root.iterdir():
        number = iteration_of(path.with_suffix("") if path.suffix == ".partial" else path)
        if number is not None and number <= marked:
            if path.suffix == ".partial":
                torn.append(path)
            elif (path / INFO_FILE).is_file():  # what others have put here stays
                whole.append((number, path.suffix == "", path))
    for _, _, path in sorted(whole)[:-keep]:
        remove(path)
    for path in torn:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold a folder of checkpoints against other jobs as long as the block runs, however it ends (a kill frees it too).

    Raises:
        ValueError: another job saves there, naming its host and process; or the folder cannot be written.
    """
    me = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        stream = (root / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--save {root} cannot be written ({error.strerror}); give another folder, or the right to write there") from None
    with stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not held on by the data loader's forks after a kill
        except BlockingIOError:
            stream.seek(0)
            raise ValueError(
                f"--save {root} is in use by {stream.read() or 'another job'}; two jobs in one folder would lose checkpoints: end "
                "it, or give another --save"
            ) from None
        stream.truncate(0)
        stream.write(me)
        stream.flush()
        yield
