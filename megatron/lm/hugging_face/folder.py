"""Folders of safetensors and JSON files, read without running code or leaving the folder. `files.new_folder` creates them completely or not
at all.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.lm.shell.files import read_input

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # as in the folders that transformers writes


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise a ValueError if the file is missing or damaged, or contains something else."""
    refuse_irregular(path.parent, [path.name])
    text = read_input(path, "a folder that transformers' `save_pretrained` wrote")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): restore it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains {type(content).__name__}, not an object: restore it")
    return content


def refuse_irregular(folder: Path, names: Iterable[str]) -> None:
    """Raise a ValueError if one of these files of a folder exists and is a pipe, a device or a folder, which would otherwise be read, or
    skipped without a message."""
    for name in names:
        if (folder / name).exists() and not (folder / name).is_file():
            raise ValueError(f"{folder / name} is not a regular file: put the file itself there")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, indented, to `path`."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder by name: of model.safetensors, or of the files that its index names. Read one at a time.

    Raises:
        ValueError: no such file, a damaged one, or an index that names files elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        refuse_irregular(folder, (INDEX, MODEL))
        if (folder / INDEX).is_file():
            files = read_json(folder / INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ValueError(f"{folder / INDEX} has no weight_map of tensor to file: restore it")
            for file in files.values():
                # Both separators, whatever the system: a name is a name, not a path.
                if "/" in file or "\\" in file or not file.endswith(".safetensors"):
                    raise ValueError(f"{folder / INDEX} names the file {file!r}: only .safetensors files of the folder itself are read")
            self._file = {name: folder / file for name, file in files.items()}
        elif (folder / MODEL).is_file():
            with _opened(folder / MODEL) as opened:
                self._file = dict.fromkeys(opened.keys(), folder / MODEL)
        else:
            raise ValueError(
                f"{folder} contains neither {MODEL} nor {INDEX}; pickled files (pytorch_model.bin) are not read: save the model again with "
                "safe_serialization"
            )

    def __getitem__(self, name: str) -> Tensor:
        path = self._file[name]
        with _opened(path) as opened:
            if name not in opened.keys():  # noqa: SIM118 (no dict)
                raise ValueError(f"{path} lacks {name}, which {INDEX} lists: restore the folder")
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def check_finite(name: str, x: Tensor) -> None:
    """Raise a ValueError if a tensor contains NaN or Inf."""
    finite = (x.float() if x.itemsize == 1 else x).isfinite()  # torch has no isfinite for FP8
    if not finite.all():
        bad, dtype = int((~finite).sum()), str(x.dtype).removeprefix("torch.")
        raise ValueError(f"{name} contains {bad} non-finite values (NaN or Inf) in {dtype}: give a valid model, or another --dtype")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise ValueError(f"{path} cannot be read (it is missing, or not a regular file): restore it")
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it") from None


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str] | None = None, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write `tensors` to model.safetensors, or, if they exceed `shard_bytes`, to several files and an index.

    At most one file's tensors are in memory at a time.

    Returns:
        Bytes of the tensors.
    """
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        try:
            save_file(held, folder / f"{len(files)}.part", {"format": "pt", **(metadata or {})})
        except SafetensorError as error:  # the file system's error
            raise OSError(str(error)) from None
        files.append(list(held))
        held.clear()

    for name, x in tensors:
        if held and sum(y.nbytes for y in held.values()) + x.nbytes > shard_bytes:
            flush()
        held[name] = x
        total += x.nbytes
    flush()
    names = [MODEL] if len(files) == 1 else [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, held_names in zip(names, files, strict=True) for tensor in held_names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total
