"""Measure speed and memory of whole steps on one GPU: FP8-LM's Table 5, Collage's Table 7 and Figure 4, COAT's table.

The papers measured clusters with ZeRO. Here a whole model runs on one GPU, so memory is reported without the paper's figure, and speed as
a multiple of the baseline's, which is what the papers claim.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.bench.bench_optimizer import BY_TORCH
from tools.bench.rows import machine
from tools.measurements import Row, read
from tools.reproduce.coat_memory import CASES, table
from tools.reproduce.entry import Finding, Task
from tools.reproduce.run_tool import rows_of

NO_TRIAL = "--fp8-min-gain 0"  # no GEMM trial at the start: every layer in FP8, as in the papers

# FP8-LM Table 5, samples/s with BF16's micro-batch and with the largest.
SAMPLES5 = {"7b": {"O0": (159.2, 159.2), "O3": (219.8, 230.5)}, "13b": {"O0": (79.3, 79.3), "O3": (109.5, 121.5)}}
START5 = {"7b": 2, "13b": 1}  # micro-batch of the comparison, and start of the search
LEVELS5 = ("O0", "O1", "O2", "O3")
CARDS5 = {"7b": {"O0": (445.0, 45.0), "O3": (615.0, 31.1)}}  # the paper's TFLOP/s and MFU (%) at START5's micro-batch, on 32 cards
LAYERS5, TE5 = "175b", "megatron te-delayed"  # a model of which some layers were measured, and the baseline's case
# The paper's TFLOP/s, MFU (%) and samples/s of that model, each at its best: FP8 with micro-batch 4, the others with 1.
PAPER5 = {"O0": (386.0, 39.0, 22.4), TE5: (493.0, 24.9, 28.7), "O3": (677.0, 34.2, 39.3)}
PEERS5 = {"te-bf16": None, "te-delayed": (224.5, 159.2)}  # FP8 (TE) and BF16 of the paper
STEP, OPTIMIZER = (f"tools/bench/results/{name}.csv" for name in ("step", "optimizer"))
BASE7 = "bf16-d"  # option D
# Collage Table 7: speed over option D's.
SPEEDS7 = {
    "1.3b": {"bf16-a": 1.78, "collage-light": 1.74, "collage-plus": 1.67},
    "2.7b": {"bf16-a": 2.59, "collage-light": 2.57, "collage-plus": 2.48},
    "6.7b": {"bf16-a": 3.82, "collage-light": 3.74, "collage-plus": 3.57},
}
# %, Collage section 1: mean over its GPTs of 125M to 6.7B. Figure 4's 23.8 and 15.6 include OpenLLaMA-7B, which was not run here.
SAVED4 = {"collage-light": 22.8, "collage-plus": 14.9}
MODELS7 = {  # preset, micro-batch, flags
    "1.3b": ("1.3b", 4, ""),
    "2.7b": ("1.3b", 2, "--num-layers 32 --hidden-size 2560 --num-attention-heads 32"),
    "6.7b": ("7b", 1, ""),
}
CLAIMS_COAT = {"coat": (1.43, 1.54)}  # speed and memory ratio, from its abstract
MODELS_COAT = {"1.3b": ("1.3b", 4), "llama2-7b": ("llama2-7b", 1)}


def searched(task: Task, preset: str, at: int, cases: Sequence[str]) -> list[dict[str, Any]]:
    """Return lines of `coat_memory.table`: each case at micro-batch `at` and at the largest that fits, relative to the first case.

    A search takes minutes per case: an interrupted one resumes at its last trial on the same commit and GPU.
    """
    file, where = task.folder / f"{task.piece}.csv", machine(task.commit)
    words = ["--preset", preset, "--micro-batch-size", str(at), "--cases", *cases, f"--flags={NO_TRIAL}"]
    words += ["--csv", str(file), "--commit", where["commit"]]
    measured = rows_of("coat_memory", words, file, goes_on=True)
    return table(by_case([row for row in measured if all(row[key] == where[key] for key in ("commit", "gpu", "torch"))]), at)


def by_case(measured: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Group rows of `coat_memory.py` by case and micro-batch."""
    cases: dict[str, dict[int, Row]] = {}
    for row in measured:
        cases.setdefault(row["case"], {})[int(row["micro_batch"])] = row
    return cases


def together(preset: str, micro_batch: int, cases: Sequence[str]) -> dict[str, Row]:
    """Return the newest recorded steps in which these cases were measured at one commit on one kind of GPU, by case; empty if none.

    A commit is as new as its first row. If a case was measured twice, the first row counts, measured together with the others.

    Args:
        preset: preset with its flags, as in the file.
    """
    runs: dict[tuple[str, str], dict[str, Row]] = {}
    for row in read(STEP):
        if (row["preset"], row["micro_batch"]) == (preset, str(micro_batch)) and row["case"] in cases:
            runs.setdefault((row["commit"], row["gpu"]), {}).setdefault(row["case"], row)
    return next((rows for rows in reversed(runs.values()) if len(rows) == len(cases)), {})


def findings_of(model: str, line: Mapping[str, Any], base: str, same: float | None, largest: float | None) -> Iterator[Finding]:
    """Yield the findings of a line of `searched`: memory, and speed relative to the base at its micro-batch and at the largest.

    same, largest: the paper's figures for the two speeds.
    """
    case, at = line["case"], line["micro_batch"]
    if line["peak_gib"] == "":
        yield Finding(f"{model}, {case}, micro-batch {at}", "does not fit")
        return
    yield Finding(f"{model}, {case}, micro-batch {at}: tokens a second", float(line["tokens_s"]))
    yield Finding(f"{model}, {case}, micro-batch {at}: peak memory", float(line["peak_gib"]), unit="GiB")
    yield Finding(f"{model}, {case}: largest micro-batch", float(line["largest"]))
    yield Finding(f"{model}, {case}, its largest micro-batch: tokens a second", float(line["its_tokens_s"]))
    if case != base and line["speed"] != "":
        yield Finding(f"{model}, {case}, micro-batch {at}: times {base}'s speed", line["speed"], same)
        yield Finding(f"{model}, {case}, each at its largest: times {base}'s speed", line["its_speed"], largest)


def table5(task: Task) -> Iterator[Finding]:
    """Measure a model of FP8-LM's Table 5 on one GPU at all levels; 13B does not fit at O0."""
    model, base = task.piece, LEVELS5[0]
    samples = SAMPLES5[model]
    for line in searched(task, model, START5[model], LEVELS5):
        printed = samples.get(line["case"])
        same, largest = (value / of for value, of in zip(printed, samples[base], strict=True)) if printed else (None, None)
        yield from findings_of(model, line, base, same, largest)


def on_file(task: Task) -> Iterator[Finding]:
    """Report a model of Table 5 on one GPU from the newest recorded steps of each level and micro-batch, and Transformer Engine's.

    The largest micro-batch is the largest that was measured. Runs that ran out of memory have no row.
    """
    model, at = task.piece, START5[task.piece]
    rows = {(row["case"], int(row["micro_batch"])): row for row in read(STEP) if row["preset"] == f"{model} {NO_TRIAL}"}
    cases = by_case([row for case in LEVELS5 for (name, _), row in rows.items() if name == case])
    base = next(iter(cases))
    for line in table(cases, at):
        paper = SAMPLES5[model].get(line["case"]) if base == LEVELS5[0] else None
        same, largest = (value / of for value, of in zip(paper, SAMPLES5[model][base], strict=True)) if paper else (None, None)
        trials = cases[line["case"]]
        for finding in findings_of(model, line, base, same, largest):
            yield replace(finding, where=trials[max(trials) if "largest" in finding.quantity else at])
        at_card = trials.get(at)
        if at_card and line["case"] in CARDS5.get(model, {}):
            flops, mfu = CARDS5[model][line["case"]]
            peak = "mfu_bf16_peak" if line["case"] == LEVELS5[0] else "mfu_fp8_peak"
            told_there = f"{model}, {line['case']}, micro-batch {at}, one card"
            yield Finding(f"{told_there}: speed", float(at_card["tflops"]), flops, "TFLOP/s", where=at_card)
            yield Finding(f"{told_there}: MFU", 100 * float(at_card[peak]), mfu, "%", where=at_card)
    peers = {row["case"]: row for row in read(STEP) if row["preset"] == model and row["micro_batch"] == str(at) and row["case"] in PEERS5}
    for case, row in peers.items():
        yield Finding(f"{model}, {case}, micro-batch {at}: tokens a second", float(row["tokens_s_gpu"]), where=row)
        yield Finding(f"{model}, {case}, micro-batch {at}: peak memory", float(row["peak_gib"]), unit="GiB", where=row)
        samples, speed = PEERS5[case], float(row["tokens_s_gpu"]) / float(cases[base][at]["tokens_s_gpu"])
        yield Finding(
            f"{model}, {case}, micro-batch {at}: times {base}'s speed", speed, samples[0] / samples[1] if samples else None, where=row
        )


def layers_on_file(task: Task) -> Iterator[Finding]:
    """Report layers of 175B on one GPU, as many as fit, from the newest recorded step of each case and number of layers, and O3's speed
    relative to O0's and Transformer Engine's where these were measured with as many.

    A stage of the paper's grid has 24 layers, an eighth of each per GPU; these are whole, and send nothing.
    """
    steps = [row for row in read(STEP) if row["preset"].startswith(f"{LAYERS5} --num-layers ") and row["tflops"]]
    rows = {(row["case"], row["preset"], row["micro_batch"]): row for row in steps}
    for (case, preset, micro_batch), row in rows.items():
        card = f"{LAYERS5}, {preset.split()[2]} layers whole on a card, {case}, micro-batch {micro_batch}: "
        speed, mfu, samples = PAPER5.get(case, (None, None, None))
        yield Finding(card + "speed", float(row["tflops"]), speed, "TFLOP/s", where=row)
        share = row["mfu_bf16_peak" if case == LEVELS5[0] else "mfu_fp8_peak"]
        if share:  # a baseline prints none
            yield Finding(card + "MFU", 100 * float(share), mfu, "%", where=row)
        yield Finding(card + "peak memory", float(row["peak_gib"]), unit="GiB", where=row)
        for base in (LEVELS5[0], TE5):
            other = rows.get((base, preset, micro_batch))
            if other is not None and other is not row and case in LEVELS5:
                paper = samples / PAPER5[base][2] if samples and case != base else None
                ours = float(row["tokens_s_gpu"]) / float(other["tokens_s_gpu"])
                yield Finding(f"{card}times {base}'s speed", ours, paper, where=row)


def collage(task: Task) -> Iterator[Finding]:
    """Measure a model of Collage's Table 7 at options D, A, light and plus: speed relative to D, and the peak memory of Figure 4."""
    model, papers = task.piece, SPEEDS7[task.piece]
    preset, micro_batch, flags = MODELS7[model]
    words = ["--levels", BASE7, *papers, "--preset", preset, "--micro-batch-size", str(micro_batch), f"--flags={flags}"]
    words += ["--commit", task.commit] if task.commit else []
    file = task.folder / f"{model}.csv"
    by_option = {row["case"]: row for row in rows_of("bench_step", [*words, "--csv", str(file)], file, "tools/bench")}
    yield from options_of(model, by_option)


def collage_on_file(task: Task) -> Iterator[Finding]:
    """Report the same from the newest recorded steps in which all four options were measured at one commit.

    Raises:
        ValueError: no commit has all four.
    """
    preset, micro_batch, flags = MODELS7[task.piece]
    by_option = together(f"{preset} {flags}".strip(), micro_batch, (BASE7, *SPEEDS7[task.piece]))
    if not by_option:
        raise ValueError(f"{STEP} has no commit with all options of {task.piece}: run tools/bench/bench_step.py --levels {BASE7} ...")
    for finding in options_of(task.piece, by_option):
        yield replace(finding, where=by_option[finding.quantity.split(", ")[1].split(":")[0]])
    yield from unfused(task.piece, by_option)


def unfused(model: str, by_option: Mapping[str, Row]) -> Iterator[Finding]:
    """Yield the other options' speed over D's with the update of torch instead of ours: D's step less our update plus torch's, whose times
    per parameter are those of the last model that `bench_optimizer.py --by-torch` measured; nothing without its rows.

    The paper's multiple is given with the slowest of torch's updates, one tensor at a time."""
    rows = [row for row in read(OPTIMIZER) if row["level"].split()[0] == BASE7]
    by_torch = {row["case"]: row for row in rows if row["case"].startswith(BY_TORCH)}
    ours = {row["params_m"]: row for row in rows if row["case"] == "step in a graph"}
    base = by_option[BASE7]
    for (option, paper), (case, row) in itertools.product(SPEEDS7[model].items(), by_torch.items()):
        if row["params_m"] not in ours:
            continue
        longer = (float(row["ms"]) - float(ours[row["params_m"]]["ms"])) * float(base["params_m"]) / float(row["params_m"])
        speed = (float(base["ms"]) + longer) / float(by_option[option]["ms"])
        quantity = f"{model}, {option}: speed over D's with the update {case.removeprefix('step ')}"
        yield Finding(quantity, speed, paper if "one tensor" in case else None, where=row)


def options_of(model: str, by_option: Mapping[str, Row]) -> Iterator[Finding]:
    """Yield tokens per second, peak memory and speed relative to D of each option, as `MODEL, OPTION: QUANTITY`."""
    papers, base = SPEEDS7[model], by_option[BASE7]
    for level in (BASE7, *papers):
        yield Finding(f"{model}, {level}: tokens per second", float(by_option[level]["tokens_s_gpu"]))
        yield Finding(f"{model}, {level}: peak memory", float(by_option[level]["peak_gib"]), unit="GiB")
    for level, paper in papers.items():
        speed = float(by_option[level]["tokens_s_gpu"]) / float(base["tokens_s_gpu"])
        yield Finding(f"{model}, {level}: speed over D's", speed, paper)
        saved = 100 * (1 - float(by_option[level]["peak_gib"]) / float(base["peak_gib"]))
        yield Finding(f"{model}, {level}: peak memory saved against D", saved, unit="%")


def coat(task: Task) -> Iterator[Finding]:
    """Measure a model at BF16, O3 and COAT."""
    preset, at = MODELS_COAT[task.piece]
    base, *others = CASES
    for line in searched(task, preset, at, CASES):
        speed, less = CLAIMS_COAT.get(line["case"], (None, None))
        yield from findings_of(task.piece, line, base, speed, None)
        if line["case"] in others and line["less_memory"] != "":
            yield Finding(f"{task.piece}, {line['case']}, micro-batch {at}: times less memory", line["less_memory"], less)
