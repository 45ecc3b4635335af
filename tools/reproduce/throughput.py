"""Report speed and memory of whole steps on one GPU from recorded steps: FP8-LM's Table 5, Collage's Table 7 and Figure 4.

The papers measured clusters with ZeRO. Here a whole model runs on one GPU, so memory is reported without the paper's figure, and speed as
a multiple of the baseline's, which is what the papers claim.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.bench.bench_optimizer import BY_TORCH
from tools.measurements import Row, read
from tools.reproduce.entry import Finding, Task, paper

TABLE = ("case", "micro_batch", "ms", "tokens_s", "peak_gib", "speed", "less_memory", "largest", "its_tokens_s", "its_speed")
NO_TRIAL = "--fp8-min-gain 0"  # no GEMM trial at the start: every layer in FP8, as in the papers

PAPER5 = paper("fp8lm.table5.second")
START5 = {"7b": 2, "13b": 1}  # micro-batch of the comparison
LEVELS5 = ("O0", "O1", "O2", "O3")
LAYERS5, TE5 = "175b", "megatron te-delayed"  # a model of which some layers were measured, and the baseline's case
BEST5 = {"O0": "BF16 1", TE5: "TE 1", "O3": "FP8 4"}  # the paper's row of that model, each at its best
PEERS5 = {"te-bf16": None, "te-delayed": "TE 2"}  # the paper's row
STEP, OPTIMIZER = (f"tools/bench/results/{name}.csv" for name in ("step", "optimizer"))
BASE7 = "bf16-d"  # option D
SPEEDS7: Mapping[str, Mapping[str, float]] = paper("collage.table7")
MODELS7 = {  # preset, micro-batch, flags
    "1.3b": ("1.3b", 4, ""),
    "2.7b": ("1.3b", 2, "--num-layers 32 --hidden-size 2560 --num-attention-heads 32"),
    "6.7b": ("7b", 1, ""),
}


def by_case(measured: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Group recorded steps by case and micro-batch."""
    cases: dict[str, dict[int, Row]] = {}
    for row in measured:
        cases.setdefault(row["case"], {})[int(row["micro_batch"])] = row
    return cases


def table(cases: Mapping[str, Mapping[int, Row]], at: int) -> list[dict[str, Any]]:
    """Return a line per case: its trials at micro-batch `at` and at the largest that fits, and both relative to the first case."""

    def both(trials: Mapping[int, Row]) -> tuple[Row, int, Row]:
        held = max((size for size, row in trials.items() if row["ms"] != ""), default=0)
        return trials[at], held, trials.get(held, dict.fromkeys(("ms", "tokens_s_gpu", "peak_gib"), ""))

    def quotient(a: Any, b: Any) -> float | str:
        return "" if "" in (a, b) else round(float(a) / float(b), 2)

    base, _, base_there = both(next(iter(cases.values())))
    lines = []
    for case, (here, held, there) in ((case, both(trials)) for case, trials in cases.items()):
        speed, its_speed = (quotient(row["tokens_s_gpu"], of["tokens_s_gpu"]) for row, of in ((here, base), (there, base_there)))
        same = (here["ms"], here["tokens_s_gpu"], here["peak_gib"], speed, quotient(base["peak_gib"], here["peak_gib"]))
        lines.append(dict(zip(TABLE, (case, at, *same, held, there["tokens_s_gpu"], its_speed), strict=True)))
    return lines


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
    """Yield the findings of a line of `table`: memory, and speed relative to the base at its micro-batch and at the largest.

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


def on_file(task: Task) -> Iterator[Finding]:
    """Report a model of Table 5 on one GPU from the newest recorded steps of each level and micro-batch, and Transformer Engine's.

    The largest micro-batch is the largest that was measured. Runs that ran out of memory have no row.
    """
    model, at = task.piece, START5[task.piece]
    rows = {(row["case"], int(row["micro_batch"])): row for row in read(STEP) if row["preset"] == f"{model} {NO_TRIAL}"}
    cases = by_case([row for case in LEVELS5 for (name, _), row in rows.items() if name == case])
    base, printed = next(iter(cases)), PAPER5[model]
    papers = {"O0": (1.0, 1.0), "O3": tuple(printed[f"FP8 {size}"][1] / printed["BF16 2"][1] for size in (2, 4))}
    for line in table(cases, at):
        same, largest = papers.get(line["case"], (None, None)) if base == LEVELS5[0] else (None, None)
        trials = cases[line["case"]]
        for finding in findings_of(model, line, base, same, largest):
            yield replace(finding, where=trials[max(trials) if "largest" in finding.quantity else at])
        at_card = trials.get(at)
        if at_card and model == "7b" and line["case"] in papers:
            _, _, flops, mfu, *_ = printed["BF16 2" if line["case"] == LEVELS5[0] else "FP8 2"]
            peak = "mfu_bf16_peak" if line["case"] == LEVELS5[0] else "mfu_fp8_peak"
            told_there = f"{model}, {line['case']}, micro-batch {at}, one card"
            yield Finding(f"{told_there}: speed", float(at_card["tflops"]), flops, "TFLOP/s", where=at_card)
            yield Finding(f"{told_there}: MFU", 100 * float(at_card[peak]), mfu, "%", where=at_card)
    peers = {row["case"]: row for row in read(STEP) if row["preset"] == model and row["micro_batch"] == str(at) and row["case"] in PEERS5}
    for case, row in peers.items():
        yield Finding(f"{model}, {case}, micro-batch {at}: tokens a second", float(row["tokens_s_gpu"]), where=row)
        yield Finding(f"{model}, {case}, micro-batch {at}: peak memory", float(row["peak_gib"]), unit="GiB", where=row)
        theirs, speed = PEERS5[case], float(row["tokens_s_gpu"]) / float(cases[base][at]["tokens_s_gpu"])
        ratio = printed[theirs][1] / printed["BF16 2"][1] if theirs else None
        yield Finding(f"{model}, {case}, micro-batch {at}: times {base}'s speed", speed, ratio, where=row)


def layers_on_file(task: Task) -> Iterator[Finding]:
    """Report layers of 175B on one GPU, as many as fit, from the newest recorded step of each case and number of layers, and O3's speed
    relative to O0's and Transformer Engine's where these were measured with as many.

    A stage of the paper's grid has 24 layers, an eighth of each per GPU; these are whole, and send nothing.
    """
    steps = [row for row in read(STEP) if row["preset"].startswith(f"{LAYERS5} --num-layers ") and row["tflops"]]
    rows = {(row["case"], row["preset"], row["micro_batch"]): row for row in steps}
    best = {case: PAPER5[LAYERS5][name] for case, name in BEST5.items()}
    for (case, preset, micro_batch), row in rows.items():
        card = f"{LAYERS5}, {preset.split()[2]} layers whole on a card, {case}, micro-batch {micro_batch}: "
        _, samples, speed, mfu, *_ = best.get(case, [None] * 6)
        yield Finding(card + "speed", float(row["tflops"]), speed, "TFLOP/s", where=row)
        share = row["mfu_bf16_peak" if case == LEVELS5[0] else "mfu_fp8_peak"]
        if share:  # a baseline prints none
            yield Finding(card + "MFU", 100 * float(share), mfu, "%", where=row)
        yield Finding(card + "peak memory", float(row["peak_gib"]), unit="GiB", where=row)
        for base in (LEVELS5[0], TE5):
            other = rows.get((base, preset, micro_batch))
            if other is not None and other is not row and case in LEVELS5:
                ratio = samples / best[base][1] if samples and case != base else None
                ours = float(row["tokens_s_gpu"]) / float(other["tokens_s_gpu"])
                yield Finding(f"{card}times {base}'s speed", ours, ratio, where=row)


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
    for (option, multiple), (case, row) in itertools.product(SPEEDS7[model].items(), by_torch.items()):
        if row["params_m"] not in ours:
            continue
        longer = (float(row["ms"]) - float(ours[row["params_m"]]["ms"])) * float(base["params_m"]) / float(row["params_m"])
        speed = (float(base["ms"]) + longer) / float(by_option[option]["ms"])
        quantity = f"{model}, {option}: speed over D's with the update {case.removeprefix('step ')}"
        yield Finding(quantity, speed, multiple if "one tensor" in case else None, where=row)


def options_of(model: str, by_option: Mapping[str, Row]) -> Iterator[Finding]:
    """Yield tokens per second, peak memory and speed relative to D of each option, as `MODEL, OPTION: QUANTITY`."""
    papers, base = SPEEDS7[model], by_option[BASE7]
    for level in (BASE7, *papers):
        yield Finding(f"{model}, {level}: tokens per second", float(by_option[level]["tokens_s_gpu"]))
        yield Finding(f"{model}, {level}: peak memory", float(by_option[level]["peak_gib"]), unit="GiB")
    for level, multiple in papers.items():
        speed = float(by_option[level]["tokens_s_gpu"]) / float(base["tokens_s_gpu"])
        yield Finding(f"{model}, {level}: speed over D's", speed, multiple)
        saved = 100 * (1 - float(by_option[level]["peak_gib"]) / float(base["peak_gib"]))
        yield Finding(f"{model}, {level}: peak memory saved against D", saved, unit="%")
