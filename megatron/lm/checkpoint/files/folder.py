"""Checkpoints on disk: the names in a folder of checkpoints, the choice of the one to load, and how one appears and goes atomically.

    ROOT/iter_0000100/           a checkpoint: a data file of each rank, `plan.json`, and `checkpoint.json` written last
    ROOT/iter_0000200.partial/   one that is being written, or that a kill has left
    ROOT/latest_checkpointed_iteration.txt

`checkpoint.json` holds what is not a tensor, the size and the SHA-256 of every other file, and a seal over itself.

The marker names the newest healthy checkpoint (`megatron.lm.training.health`). It is obeyed: people go back by editing it. Where the
checkpoint that it names is damaged, the next older healthy one of the same run (`megatron.lm.training.identity`) is taken; where the marker
is missing or unreadable, the newest.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.checkpoint.files.versions import files_of, upgraded
from megatron.lm.config import LATEST_CHECKPOINT_FILE
from megatron.lm.shell.durable import flush, written_aside
from megatron.lm.shell.opening import read_text, to_write
from megatron.lm.training import health, identity
from megatron.lm.training.identity import Run

INFO_FILE = "checkpoint.json"
RELEASE = "release"
_NAME = re.compile(r"iter_(\d{7,})(\.replaced)?")
_BLOCK = 2**22


def iteration_folder(root: Path, iteration: int) -> Path:
    """Folder of the checkpoint of an iteration, in Megatron-LM's spelling."""
    return root / f"iter_{iteration:07d}"


def partial_folder(folder: Path) -> Path:
    """Folder in which a checkpoint is written before it is whole."""
    return folder.with_name(folder.name + ".partial")


def iteration_of(folder: Path) -> int | None:
    """The iteration that a folder of this name holds; None for other names."""
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def marked_iteration(root: Path) -> int | None:
    """The iteration that the marker file names; None where it is missing or names none."""
    try:
        return int(read_text(root / LATEST_CHECKPOINT_FILE).strip())
    except (OSError, ValueError):
        return None


def exists(root: Path) -> bool:
    """Whether `root` holds checkpoints, whole or not, of any program; the marker alone counts too."""
    return (root / LATEST_CHECKPOINT_FILE).is_file() or any(_numbered(root))


def _numbered(root: Path) -> Iterator[tuple[int, Path]]:
    """Iterations and folders of all entries with the names of checkpoints."""
    if root.is_dir():
        for path in root.iterdir():
            number = iteration_of(path)
            if number is not None and path.is_dir():
                yield number, path


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
    with to_write(file, "wb") as stream:
        stream.write(json.dumps(info | {"seal": _seal(info)}, indent=1).encode())
        stream.flush()
        os.fsync(stream.fileno())
    flush(folder)


def read_info(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's `checkpoint.json`; an older version is translated into today's settings (`versions`).

    Raises:
        ValueError: the folder is not a whole checkpoint of a version that is read, or has the name of another iteration; the message says
            why. File contents are judged by `check_files`.
    """
    info, file, number = sealed_info(folder), folder / INFO_FILE, iteration_of(folder)
    if number is not None and info.get("iteration") != number:
        raise ValueError(f"{folder} holds iteration {info.get('iteration')}: the folder was renamed; give it its name again")
    for name, entry in info["files"].items():
        path = folder / name
        if Path(name).name != name:
            raise ValueError(f"{file} names {name!r}, which is outside its folder")
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            raise ValueError(f"{path} is {'missing' if size is None else f'{size} bytes long'}; it should be {entry['bytes']} bytes long")
    return info


def sealed_info(folder: Path) -> dict[str, Any]:
    """As `read_info`, without a look at the other files and the folder's name."""
    file = folder / INFO_FILE
    if not file.is_file():
        raise ValueError(f"{folder} {_what_it_is(folder)}")
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error})") from None
    if not isinstance(info, dict) or info.get("seal") != _seal({key: value for key, value in info.items() if key != "seal"}):
        raise ValueError(f"{file} is damaged: its seal does not fit its contents")
    try:
        info = upgraded(info)
        files_of(info)
    except ValueError as problem:
        raise ValueError(f"{folder} {problem}") from None
    return info


def check_files(folder: Path, files: dict[str, Any]) -> None:
    """ValueError naming the first of the `files` (entries of `checkpoint.json`) with other contents than were written."""
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
    if (folder / "common.pt").is_file():
        return "was written by Megatron-LM as torch_dist, which the trainer reads: give it this --load, and another --save"
    if any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        return "was written by Megatron-LM as --ckpt-format torch: save it there as torch_dist, or take it through Hugging Face's format"
    return f"is no checkpoint, or one without {INFO_FILE}, which is written last"


class Candidates(NamedTuple):
    """Folders that may hold the checkpoint to load, best first, and lines about the others."""

    folders: list[Path]
    remarks: list[str]


def candidates(root: Path, iteration: int | None = None, *, unhealthy: bool = False) -> Candidates:
    """The checkpoints that may be loaded from `root`: the marked one, then older ones from the newest down, without unhealthy ones and
    those of other runs. One that cannot be read is among them, so that its reader says what is wrong.

    Args:
        root: folder of checkpoints.
        iteration: only that one.
        unhealthy: unhealthy ones too.
    """
    if iteration is None and _is_release(root):
        return Candidates([root / RELEASE], [])
    marked, marker = marked_iteration(root) if iteration is None else iteration, root / LATEST_CHECKPOINT_FILE
    # A replaced one stands beside, or for a moment in the place of, the one that was saved over it.
    found = sorted(_numbered(root), key=lambda pair: (-pair[0], pair[1].name))
    offered = [(n, path) for n, path in found if (n == iteration if iteration is not None else marked is None or n <= marked)]
    remarks: list[str] = []
    if marked is None and found:
        remarks.append(f"{marker} is missing or names no iteration: the newest healthy checkpoint is looked for")
    newer = sorted({number for number, _ in found} - {number for number, _ in offered}) if iteration is None else []
    if newer:
        remarks.append(f"{marker} names iteration {marked}: newer ones, {', '.join(map(str, newer))}, are left (name one by --ckpt-step)")
    folders: list[Path] = []
    if marked is not None and root.is_dir() and (iteration is None or offered) and marked not in dict(offered):
        folders.append(iteration_folder(root, marked))  # so that its reader says that it is missing
    judged = _judged(offered, unhealthy)
    return Candidates([*folders, *judged.folders], [*remarks, *judged.remarks])


def _is_release(root: Path) -> bool:
    """Whether the marker names Megatron-LM's checkpoint of weights to hand out, which stands at no iteration."""
    try:
        return read_text(root / LATEST_CHECKPOINT_FILE).strip() == RELEASE and (root / RELEASE).is_dir()
    except (OSError, ValueError):
        return False


def _judged(offered: Sequence[tuple[int, Path]], unhealthy: bool) -> Candidates:
    """Those of one run that are healthy or cannot be read, and why the others are passed over."""
    folders, remarks = [], []
    first: dict[str, Any] | None = None
    for number, path in offered:
        try:
            info = sealed_info(path)
        except ValueError:
            folders.append(path)
            continue
        problem = health.problem_of(info)
        if first is not None and not _one_run(first, info):
            remarks.append(f"passed over: {path} is a checkpoint of another run")
        elif problem is not None and not unhealthy:
            remarks.append(f"passed over: {path} is unhealthy: {problem} (--ckpt-step {number} --load-unhealthy takes it)")
        else:
            folders.append(path)
        first = first or info
    return Candidates(folders, remarks)


def _one_run(newer: dict[str, Any], older: dict[str, Any]) -> bool:
    """Whether a checkpoint is of the run that saved a newer one; by their `checkpoint.json`."""
    run = identity.of(newer)
    return identity.of(older) is None if run is None else run.holds(older)


def owner(root: Path) -> dict[str, Any] | None:
    """`checkpoint.json` of the checkpoint that identifies the run in `root`: the marked one, else the newest that can be read."""
    marked = marked_iteration(root)
    for _, path in sorted(_numbered(root), key=lambda pair: (pair[0] == marked, pair[0]), reverse=True):
        try:
            return sealed_info(path)
        except ValueError:
            continue
    return None


def refuse_other_run(root: Path, run: Run) -> None:
    """ValueError where `root` holds checkpoints that are not of `run`, with the ways out."""
    info = owner(root)
    if any(_numbered(root)) and (info is None or not run.holds(info)):
        held = f"another run (iteration {info['iteration']} of {identity.name(info)[:8]})" if info else "checkpoints that cannot be read"
        if info is None and any((path / "common.pt").is_file() for _, path in _numbered(root)):
            raise ValueError(
                f"{root} holds checkpoints of Megatron-LM, and saving there would lose them: give --load {root} and another --save"
            )
        raise ValueError(
            f"{root} holds {held}, and saving there would lose it: give --load {root} --save {root} to go on with it, another "
            "--save to keep both, or move it away"
        )


def latest(root: Path, iteration: int | None = None, *, unhealthy: bool = False, say: bool = True) -> Path:
    """The first of `candidates` that looks whole: its files are there and of their size.

    With `say`, tells on stdout which ones it passed over, and why.

    Raises:
        ValueError: there is none; the message says what is wrong with each, and what to do.
    """
    offered = candidates(root, iteration, unhealthy=unhealthy)
    problems: list[str] = []
    for folder in offered.folders:
        try:
            read_info(folder)
        except ValueError as problem:
            problems.append(f"passed over: {problem}")
            continue
        for text in (*offered.remarks, *problems) if say else ():
            print(text, flush=True)
        return folder
    raise no_checkpoint(root, iteration, [*offered.remarks, *problems])


def no_checkpoint(root: Path, iteration: int | None, remarks: list[str]) -> ValueError:
    """The error to raise where no checkpoint of `candidates` serves, with what was said of each."""
    marker, marked = root / LATEST_CHECKPOINT_FILE, marked_iteration(root)
    if iteration is not None and not remarks:
        return ValueError(f"{root} holds no checkpoint of iteration {iteration}; it holds {_held(root)}")
    if iteration is None and marked is not None and not any(number <= marked for number, _ in _numbered(root)):
        return ValueError(f"{marker} names iteration {marked}, which is missing; {root} holds {_held(root)}")
    if remarks:
        problems = "; ".join(text.removeprefix("passed over: ") for text in remarks)
        return ValueError(f"{root} holds no whole healthy checkpoint: {problems}. Restore one, or name another folder by --load")
    return ValueError(f"{root} holds no checkpoint: {marker} is missing or names no iteration; give the folder of an earlier --save")


def _held(root: Path) -> str:
    numbers = sorted({number for number, _ in _numbered(root)})
    return f"iterations {', '.join(map(str, numbers))} (name one by --ckpt-step)" if numbers else "none"


def publish(folder: Path, *, mark: bool = True) -> None:
    """Bring a finished `.partial` folder to its name `folder`, then move the marker to it, unless it is unhealthy (`mark`); at every
    moment a whole checkpoint can be found.
    """
    aside = folder.with_name(folder.name + ".replaced")
    if folder.exists():  # a run that was started again has come by here before
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    partial_folder(folder).rename(folder)
    flush(folder.parent)
    if mark:
        _mark(folder)
    remove(aside)


def _mark(folder: Path) -> None:
    """Write the name of a checkpoint into the marker."""
    with written_aside(folder.with_name(LATEST_CHECKPOINT_FILE)) as stream:
        stream.write(str(iteration_of(folder)).encode())


def condemn(folder: Path, problem: str) -> Path | None:
    """Mark a published checkpoint as unhealthy, and have the marker name the newest healthy one. Returns that; None if there is none."""
    file = folder / INFO_FILE
    info = json.loads(file.read_text(encoding="utf-8"))
    del info["seal"]
    aside = new_partial_folder(folder)
    write_info(aside, info | {"health": info.get("health", {}) | {"problem": problem}})
    (aside / INFO_FILE).rename(file)
    flush(folder)
    aside.rmdir()
    try:
        healthy = latest(folder.parent, say=False)
    except ValueError:
        return None
    _mark(healthy)
    return healthy


def remove(folder: Path) -> None:
    """Delete a checkpoint so that a kill in between leaves nothing that looks whole."""
    if folder.exists():
        shutil.rmtree(partial_folder(folder), ignore_errors=True)
        shutil.rmtree(folder.rename(partial_folder(folder)), ignore_errors=True)


def prune(newest: Path, keep: int, *, settled: bool) -> None:
    """Delete the checkpoints of a run up to `newest`, the last that it saved, except for the last `keep` and the newest healthy ones. It
    keeps two healthy ones, since the steps to come may `condemn` one of them, or one where `newest` is healthy and that is `settled`.
    """
    last = sealed_info(newest)
    mine: list[tuple[int, bool, bool, Path]] = []  # iteration, not a replaced one, healthy
    for number, path in _numbered(newest.parent):
        if number > (iteration_of(newest) or 0) or not (path / INFO_FILE).is_file():  # what others have put here stays
            continue
        try:
            info: dict[str, Any] | None = read_info(path)
        except ValueError:
            info = None
        if info is None or _one_run(last, info):
            mine.append((number, path.suffix == "", info is not None and health.problem_of(info) is None, path))
    mine.sort()
    healthy = [path for _, _, is_healthy, path in mine if is_healthy]
    for *_, path in mine[:-keep]:
        if path not in healthy[-1 if settled and newest in healthy else -2 :]:
            remove(path)


def tidy(root: Path) -> list[str]:
    """Clear up a folder that this job holds: delete the remains of killed saves, and rewrite a missing or unreadable marker. Returns lines
    that say so.
    """
    said = []
    for path in sorted(root.glob("iter_*.partial")):
        if iteration_of(path.with_suffix("")) is not None:
            shutil.rmtree(path)
            said.append(f"deleted {path}, which an interrupted save has left")
    if marked_iteration(root) is None:
        try:
            folder = latest(root, say=False)
        except ValueError:  # none that a marker could name
            return said
        _mark(folder)
        said.append(f"wrote {root / LATEST_CHECKPOINT_FILE} anew: it names iteration {iteration_of(folder)}")
    return said
