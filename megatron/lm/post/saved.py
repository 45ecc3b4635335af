"""The folder of a run: checkpoints by which the same command goes on bit for bit, its metrics, and the model at its end.

A checkpoint is one file, `step_00000010.pt`, which has its name only once all of it is on the disk; the newest two stay. Metrics are part
of it, so that `metrics.jsonl` is of the steps that led there and of no others.
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
MODEL = "model"  # the folder of the finished model


def save(folder: Path, step: int, content: Mapping[str, Any], settings: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> None:
    """Write a checkpoint and the metrics beside it, and remove all but the newest.

    Args:
        folder: of the run, made where it is missing.
        step: taken so far.
        content: states of models and optimizers, of tensors and plain values alone.
        settings: of the command, which `load` compares.
        metrics: a mapping a step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"step": step, "settings": dict(settings), "metrics": [dict(row) for row in metrics], "content": dict(content)}
    with written_aside(folder / f"step_{step:08d}.pt") as stream:
        torch.save(whole, stream)
    write_metrics(folder, metrics)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink()


def write_metrics(folder: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """`metrics.jsonl`, an object a line."""
    folder.mkdir(parents=True, exist_ok=True)
    with written_aside(folder / "metrics.jsonl") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in metrics).encode())


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones in a folder, the oldest first."""
    return sorted(path for path in folder.glob("step_*.pt") if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def load(folder: Path, settings: Mapping[str, Any], device: torch.device | str) -> dict[str, Any] | None:
    """The newest checkpoint of a run: `step`, `metrics` and `content`; None where there is none.

    Raises:
        ValueError: it was written by other settings, naming the first that differs, or is damaged.
    """
    found = checkpoints(folder)
    if not found:
        if folder.is_dir() and any(path.name != "metrics.jsonl" and path.suffix != ".partial" for path in folder.iterdir()):
            raise ValueError(f"--save {folder} holds other files and no checkpoint: name an empty folder, or a new one")
        return None
    path = found[-1]
    try:
        whole = torch.load(path, map_location=device, weights_only=True)
        written = whole["settings"]
    except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        text = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} is damaged ({text}): delete it, and the same command goes on from the one before") from None
    for name in [*settings, *written]:
        if settings.get(name) != written.get(name):
            raise ValueError(
                f"{path} was written with --{name.replace('_', '-')} {written.get(name)!r}, and it is {settings.get(name)!r} now: give the "
                "same, or another --save"
            )
    return whole


def due(args: argparse.Namespace, step: int) -> bool:
    """Whether a run writes a checkpoint after so many steps: every `--save-interval`, and after the last."""
    return not args.no_checkpoints and (step % args.save_interval == 0 or step == args.train_iters)


def finish(args: argparse.Namespace, model: Any, tokenizer: Any, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Keep what a run ends with, and tell where: its model or, without checkpoints, its metrics alone."""
    if args.no_checkpoints:
        write_metrics(args.save, metrics)
        return f"{args.save} holds the metrics alone"
    return f"the model is in {save_model(args.save, model, tokenizer)}"


def save_model(folder: Path, model: Any, tokenizer: Any) -> Path:
    """Write model and tokenizer as `from_pretrained` reads them, to a folder that has its name once it is whole; the folder."""
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
