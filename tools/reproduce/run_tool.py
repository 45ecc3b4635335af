"""Run a tool of this folder, or one of the trainer, in its own process, and read its rows."""

import csv
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.measurements import ROOT, Row
from tools.reproduce.trainings import byte_data, trained

TRAINERS = "--tokenizer-type GPT2BPETokenizer"


def rows_of(tool: str, words: Sequence[str], file: Path, folder: str = "tools/reproduce") -> list[Row]:
    """Run `FOLDER/TOOL.py` and return the rows that it writes to `file`, which is replaced.

    Args:
        tool, words, folder: the tool and its arguments.
        file: the CSV that the arguments name.

    Raises:
        RuntimeError: it fails; with the end of its stderr.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"{folder.replace('/', '.')}.{tool}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{folder}/{tool}.py {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def byte_flags(text: Path, folder: Path) -> list[str]:
    """Return the trainer's flags to read a text byte by byte."""
    data = byte_data(text, folder / "bytes")
    words = f"--train-data-path {data}/train_text_document {TRAINERS} --vocab-file {data}/encoder.json --merge-file {data}/vocab.bpe"
    return words.split()


def checkpoint(level: str, steps: int, shape: str, data: Path, folder: Path) -> Path:
    """Train briefly at a level and return the folder of the checkpoint; `data` is a folder that `msamp prepare-text` wrote."""
    saved = folder / f"{level}_{steps}"
    flags = f"{shape} --save {saved} --save-interval {steps}"
    trained(level, 1234, steps, flags, data, folder / "runs")
    return saved


def numbers(row: Row, names: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of the columns in `names`, column -> name, that are not empty."""
    for key, name in names.items():
        if row.get(key):
            yield name, float(row[key])
