"""The folder of a run: checkpoints from which the same command resumes bit for bit, metrics, and the final model.

A checkpoint is one file, `step_00000010.pt`, renamed to that name when it is complete; the newest two are kept. It contains the metrics, so
that after a resume `metrics.jsonl` has exactly the steps before the checkpoint.
"""

import argparse
import json
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.lm.shell.durable import flush, written_aside

KEPT = 2
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
    found = checkpoints(folder)
    if not found:
        if folder.is_dir() and any(path.name != "metrics.jsonl" and path.suffix != ".partial" for path in folder.iterdir()):
            raise ValueError(f"--save {folder} contains other files but no checkpoint: choose an empty or new folder")
        return None
    path = found[-1]
    try:
        whole = torch.load(path, map_location=device, weights_only=True)
        written = whole["settings"]
    except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        text = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} is damaged ({text}): delete it, and run the same command to resume from the previous one") from None
    for name in [*settings, *written]:
        if settings.get(name) != written.get(name):
            raise ValueError(
                f"{path} was written with --{name.replace('_', '-')} {written.get(name)!r}, but it is {settings.get(name)!r} now: use the "
                "same value, or another --save"
            )
    return whole


def due(args: argparse.Namespace, step: int) -> bool:
    """Return whether a run writes a checkpoint after this step: every `--save-interval` steps, and after the last."""
    return not args.no_checkpoints and (step % args.save_interval == 0 or step == args.train_iters)


def finish(args: argparse.Namespace, model: Any, tokenizer: Any, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Save the final model, or only the metrics without checkpoints, and return a line with the location."""
    if args.no_checkpoints:
        write_metrics(args.save, metrics)
        return f"{args.save} contains the metrics"
    return f"the model is in {save_model(args.save, model, tokenizer)}"


def save_model(folder: Path, model: Any, tokenizer: Any) -> Path:
    """Write model and tokenizer for `from_pretrained` to a folder, renamed when it is complete, and return it."""
    final, partial = folder / MODEL, folder / f"{MODEL}.partial"
    if final.exists():
        return final
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        flush(path)
    flush(partial)
    partial.rename(final)
    flush(folder)
    return final
