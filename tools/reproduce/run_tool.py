"""Entries that run a tool of this folder, or one of the trainer, in a process of its own, and take its rows for findings."""

import csv
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.docs.evidence import ROOT, Row
from tools.reproduce.trainings import byte_data, trained

TRAINERS = "--tokenizer-type GPT2BPETokenizer"


def rows_of(tool: str, words: Sequence[str], file: Path, folder: str = "tools/reproduce", *, goes_on: bool = False) -> list[Row]:
    """The rows that `FOLDER/TOOL.py` writes to `file`, which is made anew.

    Args:
        tool, words, folder: the tool and its arguments.
        file: the CSV that the arguments name.
        goes_on: the tool takes what a call that was cut off has left in `file`, which stays.

    Raises:
        RuntimeError: it fails; with the end of what it said.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if not goes_on:
        file.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"{folder.replace('/', '.')}.{tool}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{folder}/{tool}.py {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def byte_flags(text: Path, folder: Path) -> list[str]:
    """The trainer's flags for a text, byte by byte."""
    data = byte_data(text, folder / "bytes")
    words = f"--train-data-path {data}/train_text_document {TRAINERS} --vocab-file {data}/encoder.json --merge-file {data}/vocab.bpe"
    return words.split()


def checkpoint(level: str, steps: int, shape: str, data: Path, folder: Path) -> Path:
    """The folder of a checkpoint of a short training at a level; `data` is as `megatron.lm.tools.prepare_text` makes it."""
    saved = folder / f"{level}_{steps}"
    flags = f"{shape} --save {saved} --save-interval {steps}"
    trained(level, 1234, steps, flags, data, folder / "runs")
    return saved


def numbers(row: Row, wanted: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """(name, value) of the columns of `wanted`, column -> name, that are there."""
    for key, name in wanted.items():
        if row.get(key):
            yield name, float(row[key])
