"""Versions of the checkpoint format: contents, supported versions, and conversion of older ones.

`version` in `checkpoint.json` is the number of the format. Every change that an older reader would misread or not know increments it.

1   A folder with one file, `state.pt`, and no `checkpoint.json`.
2   One file per rank, such as `mp_rank_00_000.pt`, and no `checkpoint.json`.
3   `checkpoint.json`, a plan and one sharded file per rank; plan and files are pickles of torch's distributed checkpoint.
4   As 3, with the optimizer states under the names that the update declares, and `precision.fp8_recipe` instead of `fp8_scaling`.
5   `checkpoint.json`, with the keys that `content` lists. The plan is `plan.json` (`index`), and a data file, `__RANK_0.bin`, contains the
    bytes of tensors only. The states are those that the update declares, under its own names. `checkpoint.json` may also contain the run
    (`run`) and its health (`health`).
6   As 5, and the configuration has `precision.master_rounding` and `moment_rounding`: nearest in version 5, whatever the recipe's default
    is now. A dataset in `data` may also contain the digest of all its tokens (`whole`). `fp8_guard` is the guard's state, or None; older
    code does not know its settings and refuses the configuration.

This code reads versions 5 and 6. `upgraded` rewrites the configuration, one step per version, so that the rest of the code knows only the
current one. Tensors of both versions have the same keys, and a run resumes from either bit for bit. No release wrote version 4 or older;
they are refused, and the message says which code reads them. A version above 6 is refused with the advice to use newer code, because this
code cannot know what else such a checkpoint contains. As with a damaged checkpoint, a resume then falls back to an older one in the same
folder, if there is one, and prints a line.

A setting that a run does not set is saved as unset, and means the default on resume. So a new default is a new version too, with a step
that writes the previous default into older configurations.

To raise `VERSION`, first write checkpoints of the old version, with the code that still writes it: `tests/helpers/make_checkpoints.py`
writes them for `tests/megatron/lm/checkpoint/files/test_versions.py`, which resumes each. Then add a paragraph above and a step to
`_STEPS`.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from megatron.lm.config import ModelConfig, PrecisionConfig
from megatron.lm.config.cli import config_from_dict
from megatron.lm.config.sections.schema import flag
from msamp.nn.precision_guard import is_state

VERSION = 6
# Settings that older code saved and that no longer exist. None of them changes what a run computes.
GONE = frozenset({"emergency_save"})


def upgraded(info: dict[str, Any]) -> dict[str, Any]:
    """Convert `checkpoint.json` of any supported version to the current one.

    Args:
        info: contents of `checkpoint.json`; not modified.

    Raises:
        ValueError: if the version is too new or too old; the message continues after the name of the checkpoint.
    """
    version, oldest = info.get("version"), min(_STEPS)
    if type(version) is not int:
        raise ValueError(f"has checkpoint version {version!r}, which is not an integer; load an older checkpoint")
    config = info.get("config", {})
    if not isinstance(config, dict) or not all(isinstance(values, dict) for values in config.values()):
        raise ValueError("has a configuration that is not sections of settings; load an older checkpoint")
    if version > VERSION:
        raise ValueError(
            f"has checkpoint version {version}, but this code reads versions {oldest} to {VERSION}: use the version that wrote it, or newer"
        )
    if version < oldest:
        raise ValueError(
            f"has checkpoint version {version}, but this code reads versions {oldest} to {VERSION}: resume with the version of msamp that "
            f"wrote it; to convert it, resume and save again with one that reads {version} and writes {oldest} or newer"
        )
    for name, is_one in _ENTRIES.items():
        if info.get(name) is not None and not is_one(info[name]):
            raise ValueError(f"has {name} {info[name]!a:.80} in its checkpoint.json, which no run writes; load an older checkpoint")
    config = {section: {name: x for name, x in values.items() if name not in GONE} for section, values in config.items()}
    for step in range(version, VERSION):
        _STEPS[step](config)
    return info | {"version": VERSION, "config": config}


def files_of(info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return bytes and sha256 of the other files by name; raise a ValueError, which continues after the checkpoint's name, if missing."""
    files = info.get("files")
    if not isinstance(files, dict):
        raise ValueError("has a checkpoint.json without a table of files; load an older checkpoint")
    for name, entry in files.items():
        match entry:
            case {"bytes": length, "sha256": str(digest)} if _natural(length) and re.fullmatch("[0-9a-f]{1,64}", digest):
                continue
        raise ValueError(f"has a checkpoint.json without bytes and SHA-256 of {name!r}; load an older checkpoint")
    return files


def check_info(info: dict[str, Any]) -> None:
    """Check the plain values of a checkpoint of the current version.

    Raises:
        ValueError: if a number is out of range, the loss scale is invalid, or settings have wrong types; the message continues after the
            name of the checkpoint.
    """
    for name in _COUNTS:
        if not _natural(info.get(name)) or (name in _AT_LEAST_ONE and not info[name]):
            least = int(name in _AT_LEAST_ONE)
            raise ValueError(f"has {name} {info.get(name)!r}; it must be an integer of at least {least}; load an older checkpoint")
    match info.get("loss_scale"):
        case None:
            pass
        case {"loss_scale": int() | float() as scale, "unskipped": good, **rest} if (
            0 < scale < math.inf and _natural(good) and _natural(rest.get("overflows_left", 0))
        ):
            pass
        case other:
            raise ValueError(f"has the invalid loss scale {other!r}; load an older checkpoint")
    try:
        config = config_from_dict(info.get("config", {}))
    except ValueError as problem:
        raise ValueError(f"has a configuration that cannot be read: {problem}") from None
    check_sizes(config.model, config.precision)


def check_sizes(model: ModelConfig, precision: PrecisionConfig) -> None:
    """Raise a ValueError, which continues after the checkpoint's name, if a number of the model or of its precision is one that no run can
    have: the code loops over the layers, and allocates the amax histories."""
    for section in (model, precision):
        for field in dataclasses.fields(section):
            value, legal = getattr(section, field.name), field.metadata["legal"]
            if isinstance(value, int | float) and legal is not None and value not in legal:
                raise ValueError(f"has {flag(field.name)} {value}; it must be in {legal}; load an older checkpoint")


_AT_LEAST_ONE = ("processes", "vocab_size")
_COUNTS = (
    *_AT_LEAST_ONE,
    *("iteration", "consumed_samples", "passed_over", "skipped_steps", "grad_sync_steps", "schedule_steps"),
)


def _is_run(entry: Any) -> bool:
    """Return whether it is a valid entry of `megatron.lm.training.run_record`."""
    match entry:
        case {"id": str(), "parent": None, "adopted": bool()}:
            return True
        case {"id": str(), "parent": {"run": str(), "iteration": iteration, "finetune": bool(), **more}, "adopted": bool()}:
            return _natural(iteration) and not more
    return False


def _is_health(entry: Any) -> bool:
    """Return whether it is a valid entry of `megatron.lm.training.run_record`."""
    if not isinstance(entry, dict):
        return False
    mean = entry.get("mean_loss")
    return isinstance(entry.get("problem"), str | None) and _natural(entry.get("losses", 0)) and (mean is None or _finite(mean))


def _is_data(entry: Any) -> bool:
    """Return whether it is a valid entry of `megatron.lm.data.reading.order`."""
    match entry:
        case {"order": str() | int(), "seed": int(), "datasets": [*datasets]}:
            return all(map(_is_dataset, datasets))
    return False


def _is_dataset(entry: Any) -> bool:
    match entry:
        case {"prefix": str(), "weight": weight, "documents": [first, end], "index": str(), "content": str(), **more}:
            return _natural(first) and _natural(end) and _finite(weight) and isinstance(more.get("whole"), str | None)
    return False


_ENTRIES: dict[str, Callable[[Any], bool]] = {"run": _is_run, "health": _is_health, "data": _is_data, "fp8_guard": is_state}


def _finite(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= sys.float_info.max  # isfinite raises for a larger int


def _natural(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _from_5(config: dict[str, dict[str, Any]]) -> None:
    if "precision" in config:
        config["precision"] |= {"master_rounding": "nearest", "moment_rounding": "nearest"}


# Version -> the function that converts its configuration to the next version.
_STEPS: dict[int, Callable[[dict[str, dict[str, Any]]], None]] = {5: _from_5}
