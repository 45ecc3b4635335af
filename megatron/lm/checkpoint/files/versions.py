"""Versions of the checkpoint format: the content of each, the versions that are read, and the conversion of older ones.

`version` in `checkpoint.json` is the number of the format. It rises with every change that the reader before would misread or would not
know.

1   A folder with one file, `state.pt`, and no `checkpoint.json`.
2   A file a rank, such as `mp_rank_00_000.pt`, and no `checkpoint.json`. It could be read on the same grid alone.
3   `checkpoint.json` and a sharded file a rank, with the keys that `content` lists; the states are master, exp_avg, exp_avg_sq, and of
    Collage's pairs weight_remainder and exp_avg_sq_remainder. The configuration has `precision.fp8_scaling`: delayed, current, or none for
    the recipe's own. Nothing says how delayed scaling does it: it looks at 16 steps, takes the largest amax, and leaves no margin. The
    first ones also have `logging.log_underflow_interval`; at their time two settings with a derived default of today had a fixed one.
4   Tensors as in 3. The states are those that the update declares, under its own names. The configuration has `precision.fp8_recipe`
    (tensorwise, where version 3 says current), `fp8_amax_history_len`, `fp8_amax_compute_algo` and `fp8_margin`; a precision, an update and
    a gradient exchange may be registered ones.
5   Keys, tensors and configuration as in 4. The plan is `plan.json`, and a data file, `__RANK_0.bin`, holds the bytes of tensors alone
    (`plan`). In 3 and 4 both are pickles of torch's distributed checkpoint, `.metadata` and `__RANK_0.distcp` (`pickled`).
    `checkpoint.json` also says of which run it is (`run`) and whether it is healthy (`health`); older ones say neither.
6   As 5, and the configuration has `precision.master_rounding` and `moment_rounding`: nearest in all older versions, whatever the recipe's
    default is now.

A reader of version 6 reads 3 to 6. `upgraded` rewrites the configuration, one step a version, and the rest of the code knows today's
alone. Tensors of version 3 have the keys of version 6, so that no step touches them, and a run goes on from them bit for bit. Versions 1
and 2 are refused with the advice to read them with the code of then. A version above 6 is refused with the advice to take newer code:
whatever such a checkpoint holds, this code cannot know what else to load. As with a damaged one, a resume then passes over it to an older
checkpoint in the same folder, if there is one, and says so.

A setting that a run leaves open is saved as open, and means the default on resume. So a new default is a new version too, with a step that
writes the default of before into older configurations.

To raise `VERSION`, add a paragraph above and a step to `_STEPS`, and before that, with the code that still writes the old version,
checkpoints of it: `tests/helpers/make_checkpoints.py` writes them for `tests/megatron/lm/checkpoint/files/test_versions.py`, which
resumes each.
"""

import math
import re
import sys
from collections.abc import Callable
from typing import Any

from megatron.lm.config.cli import config_from_dict

VERSION = 6


def upgraded(info: dict[str, Any]) -> dict[str, Any]:
    """`checkpoint.json` of any version that can be read -> of today's.

    Args:
        info: contents of `checkpoint.json`; stays as it is.

    Raises:
        ValueError: a version that is newer than this code, or too old for it; the message goes on from the name of the checkpoint.
    """
    version, oldest = info.get("version"), min(_STEPS)
    if type(version) is not int:
        raise ValueError(f"has checkpoint version {version!r}, which is no whole number; load an older checkpoint")
    config = info.get("config", {})
    if not isinstance(config, dict) or not all(isinstance(values, dict) for values in config.values()):
        raise ValueError("has a configuration that is not sections of settings; load an older checkpoint")
    if version > VERSION:
        raise ValueError(
            f"has checkpoint version {version}, and this code reads versions {oldest} to {VERSION}: take the code that wrote it, or newer"
        )
    if version < oldest:
        raise ValueError(
            f"has checkpoint version {version}, and this code reads versions {oldest} to {VERSION}: read it with the code of then"
        )
    for name, is_one in _ENTRIES.items():
        if info.get(name) is not None and not is_one(info[name]):
            raise ValueError(f"has {name} {info[name]!a:.80} in its checkpoint.json, which no run writes; load an older checkpoint")
    config = {section: dict(values) for section, values in config.items()}
    for step in range(version, VERSION):
        _STEPS[step](config)
    return info | {"version": VERSION, "config": config}


def files_of(info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> bytes and sha256 of the other files; ValueError, going on from the checkpoint's name, where it says none."""
    files = info.get("files")
    if not isinstance(files, dict):
        raise ValueError("has a checkpoint.json without a table of files; load an older checkpoint")
    for name, entry in files.items():
        match entry:
            case {"bytes": length, "sha256": str(digest)} if _natural(length) and re.fullmatch("[0-9a-f]{1,64}", digest):
                continue
        raise ValueError(f"has a checkpoint.json that says neither bytes nor SHA-256 of {name!r}; load an older checkpoint")
    return files


def check_info(info: dict[str, Any]) -> None:
    """Check the plain values of a checkpoint of today's version.

    Raises:
        ValueError: a number out of range, an impossible loss scale, or settings of wrong types; the message goes on from the name of
            the checkpoint.
    """
    for name in _COUNTS:
        if not _natural(info.get(name)) or (name in _AT_LEAST_ONE and not info[name]):
            least = int(name in _AT_LEAST_ONE)
            raise ValueError(f"has {name} {info.get(name)!r}; it must be a whole number from {least} on; load an older checkpoint")
    match info.get("loss_scale"):
        case None:
            pass
        case {"loss_scale": int() | float() as scale, "unskipped": good, **rest} if (
            0 < scale < math.inf and _natural(good) and _natural(rest.get("overflows_left", 0))
        ):
            pass
        case found:
            raise ValueError(f"has the loss scale {found!r}, which is none; load an older checkpoint")
    try:
        config_from_dict(info.get("config", {}))
    except ValueError as problem:
        raise ValueError(f"has a configuration that cannot be read: {problem}") from None


_AT_LEAST_ONE = ("processes", "vocab_size")
_COUNTS = (
    *_AT_LEAST_ONE,
    *("iteration", "consumed_samples", "passed_over", "skipped_steps", "grad_sync_steps", "schedule_steps"),
)


def _is_run(entry: Any) -> bool:
    """Whether `megatron.lm.training.identity` can have written it."""
    match entry:
        case {"id": str(), "parent": None, "adopted": bool()}:
            return True
        case {"id": str(), "parent": {"run": str(), "iteration": iteration, "finetune": bool(), **more}, "adopted": bool()}:
            return _natural(iteration) and not more
    return False


def _is_health(entry: Any) -> bool:
    """Whether `megatron.lm.training.health` can have written it."""
    if not isinstance(entry, dict):
        return False
    mean = entry.get("mean_loss")
    return isinstance(entry.get("problem"), str | None) and _natural(entry.get("losses", 0)) and (mean is None or _finite(mean))


def _is_data(entry: Any) -> bool:
    """Whether `megatron.lm.data.order` can have written it."""
    match entry:
        case {"order": str() | int(), "seed": int(), "datasets": [*datasets]}:
            return all(map(_is_dataset, datasets))
    return False


def _is_dataset(entry: Any) -> bool:
    match entry:
        case {"prefix": str(), "weight": weight, "documents": [first, end], "index": str(), "content": str()}:
            return _natural(first) and _natural(end) and _finite(weight)
    return False


_ENTRIES: dict[str, Callable[[Any], bool]] = {"run": _is_run, "health": _is_health, "data": _is_data}


def _finite(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= sys.float_info.max  # isfinite raises for an int that is larger


def _natural(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _from_3(config: dict[str, dict[str, Any]]) -> None:
    precision = config.get("precision", {})
    if config.get("logging", {}).pop("log_underflow_interval", None) is not None:
        fixed = {"fp8_scaling": "delayed", "save_activations": "compute"}
        precision |= {key: None for key, value in fixed.items() if precision.get(key) == value}
    if "fp8_scaling" in precision:
        scaling = precision.pop("fp8_scaling")
        precision["fp8_recipe"] = "tensorwise" if scaling == "current" else scaling


def _from_4(config: dict[str, dict[str, Any]]) -> None:
    """Its configuration is that of 5."""


def _from_5(config: dict[str, dict[str, Any]]) -> None:
    if "precision" in config:
        config["precision"] |= {"master_rounding": "nearest", "moment_rounding": "nearest"}


# Version -> the function that turns its configuration into the next one's.
_STEPS: dict[int, Callable[[dict[str, dict[str, Any]]], None]] = {3: _from_3, 4: _from_4, 5: _from_5}
