"""The folder of a run: checkpoints from which the same command resumes bit for bit, metrics, and the final model.

A checkpoint is one file, `step_00000010.pt`, renamed to that name when it is complete; the newest two are kept. It contains the metrics, so
that after a resume `metrics.jsonl` has exactly the steps before the checkpoint.
"""

import argparse
import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import msamp
from megatron.lm.hugging_face.folder import Tensors
from megatron.lm.post import models
from megatron.lm.shell.exit_codes import lacks_memory
from megatron.lm.shell.files import flush, written_aside
from msamp.integrations.saving import masters_of, plain_weights
from msamp.numerics.metrics import undelivered_share
from msamp.optim.optimizer import LowPrecisionOptimizer

KEPT = 2
TELL_BELOW = 0.9  # share of the weights' change below which a run reports what its export loses
_NAME = re.compile(r"step_(\d{8})\.pt")
MODEL = "model"  # the folder of the final model


def save(folder: Path, step: int, content: Mapping[str, Any], settings: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> None:
    """Write a checkpoint and the metrics file, and remove old checkpoints.

    Args:
        folder: of the run, created if it does not exist.
        step: number of steps so far.
        content: states of models and optimizers; only tensors and plain values.
        settings: of the command, which `load` compares.
        metrics: one mapping per step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"step": step, "settings": dict(settings), "metrics": [dict(row) for row in metrics], "content": dict(content)}
    with written_aside(folder / f"step_{step:08d}.pt") as stream:
        torch.save(whole, stream)
    write_metrics(folder, metrics)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink()


def write_metrics(folder: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Write `metrics.jsonl`, one object per line."""
    folder.mkdir(parents=True, exist_ok=True)
    with written_aside(folder / "metrics.jsonl") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in metrics).encode())


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the oldest first."""
    return sorted(path for path in folder.glob("step_*.pt") if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def load(folder: Path, settings: Mapping[str, Any], device: torch.device | str) -> dict[str, Any] | None:
    """Load the newest checkpoint of a run: `step`, `metrics` and `content`; None if there is none.

    Raises:
        ValueError: if it is damaged or was written with other settings; the message has the first one that differs.
    """
    folders = checkpoints(folder)
    if not folders:
        if folder.is_dir() and any(path.name != "metrics.jsonl" and path.suffix != ".partial" for path in folder.iterdir()):
            raise ValueError(f"--save {folder} contains other files but no checkpoint: choose an empty or new folder")
        return None
    path = folders[-1]
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: delete it, and run the same command to resume from the previous one")
    with restoring(path):
        whole = torch.load(path, map_location=device, weights_only=True)
        _check(whole)
    written = whole["settings"]
    for name in [*settings, *written]:
        if settings.get(name) != written.get(name):
            raise ValueError(
                f"{path} was written with --{name.replace('_', '-')} {written.get(name)!r}, but it is {settings.get(name)!r} now: use the "
                "same value, or another --save"
            )
    return whole


@contextlib.contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Convert every error in the block to a ValueError that `path`, a checkpoint or the folder of a run, is damaged. A file with odd
    content fails anywhere in torch.load or load_state_dict."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{path} is damaged ({text}): delete it, and run the same command to resume from the previous one") from None


def _check(whole: Any) -> None:
    """Raise a ValueError if a checkpoint does not have the entries of `save`."""
    match whole:
        case {"step": int(step), "settings": dict(settings), "metrics": [*metrics], "content": dict()} if step >= 1:
            if len(metrics) == step and all(isinstance(row, dict) for row in metrics) and all(isinstance(name, str) for name in settings):
                return
    raise ValueError("it does not have the entries of a checkpoint: step, settings, a row of metrics for each step, content")


def due(args: argparse.Namespace, step: int) -> bool:
    """Return whether a run writes a checkpoint after this step: every `--save-interval` steps, and after the last."""
    return not args.no_checkpoints and (step % args.save_interval == 0 or step == args.train_iters)


def finish(
    args: argparse.Namespace, model: Any, tokenizer: Any, metrics: Sequence[Mapping[str, Any]], optimizer: LowPrecisionOptimizer
) -> str:
    """Save the final model, or only the metrics without checkpoints, and return a line with the location."""
    if args.no_checkpoints:
        write_metrics(args.save, metrics)
        return f"{args.save} contains the metrics"
    own = args.export_dtype in (None, args.dtype)  # else rounded from the masters
    state = None if own else msamp.plain_state_dict(model, optimizer, models.DTYPES[args.export_dtype])
    message = f"the model is in {save_model(args.save, model, tokenizer, state)}"
    loaded, dtype = models.DTYPES[args.dtype], models.DTYPES[args.export_dtype or args.dtype]
    share = delivered(args.load, model, optimizer, loaded=loaded, dtype=dtype)
    if share is None or share >= TELL_BELOW:
        return message
    return f"{message}; {100 * share:.0f} % of what training changed in the weights is left in it, --export-dtype fp32 keeps the rest"


def delivered(start: Path, model: Any, optimizer: LowPrecisionOptimizer, *, loaded: torch.dtype, dtype: torch.dtype) -> float | None:
    """Return the share of training's change to the weights that survives rounding them to `dtype`, 0 to 1.

    It is sum sign(change) rounded / sum abs(change), where `change` is the difference of the masters from the weights in the folder
    `start`, which training read as `loaded`, and `rounded` that of the rounded masters
    (`msamp.numerics.metrics.undelivered_frac`). Weights that start on BF16's values return to them from less than half a step.

    Returns:
        None if nothing changed or no weight has a counterpart in the folder.
    """
    before = Tensors(start)
    wanted = arrived = 0.0
    for names, value in plain_weights(model, masters_of(optimizer) or {}):
        name = next((name for name in names if name in before), None)
        if name is not None:
            old = before[name].to(value.device, loaded).float()
            change = value - old
            wanted += float(change.abs().sum())
            arrived += float((change.sign() * (value.to(dtype).float() - old)).sum())
    return 1 - undelivered_share(wanted, arrived) if wanted else None


def save_model(folder: Path, model: Any, tokenizer: Any, state: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Write model and tokenizer for `from_pretrained` to a folder, renamed when it is complete, and return it.

    state: to write in place of the model's own state dict, in one floating-point dtype.
    """
    final, partial = folder / MODEL, folder / f"{MODEL}.partial"
    if final.exists():
        return final
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial, **({} if state is None else {"state_dict": dict(state)}))
    if state is not None:
        _say_dtype(partial / "config.json", state)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        flush(path)
    flush(partial)
    partial.rename(final)
    flush(folder)
    return final


def _say_dtype(config: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write the state's dtype to config.json, from which `from_pretrained` takes the dtype to load."""
    if config.is_file():  # adapters have none
        content = json.loads(config.read_text(encoding="utf-8"))
        dtype = next(x.dtype for x in state.values() if x.is_floating_point())
        content[next((key for key in ("dtype", "torch_dtype") if key in content), "dtype")] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
