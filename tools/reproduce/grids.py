"""Reproduce what follows from shapes: memory and volume of FP8-LM's Tables 5, 7 and 8 and Figure 1, and the memory of Collage's Table 8.

Tables 7 and 8 also report measurements on several GPUs, from recorded results.
"""

import re
from collections.abc import Iterator, Sequence

from megatron.lm.config import Config
from megatron.lm.config.cli import parse_args
from megatron.lm.config.presets import PRESETS, flops_per_token
from megatron.lm.planning import memory
from megatron.lm.planning.layers import stage_parameters, vocabulary
from megatron.lm.planning.rates import rates_of
from megatron.lm.planning.search import Planned
from tools.measurements import Row, read
from tools.precisions import case_flags
from tools.reproduce import planner, queries, table7, table8
from tools.reproduce.collage import NAMES
from tools.reproduce.entry import NOT_MEASURED, WHOLE, Finding, Task, paper

GIB = 2**30
PREDICTED = "tools/reproduce/results/planner.csv"
CARD = 80.0  # GiB of the paper's H100s; the dry run reserves 3 for CUDA and NCCL
GRIDS = {"7b": 32, "13b": 32, "175b": 128}  # GPUs of Table 5: TP x PP x DP
PRECISIONS5 = {"bf16": "BF16", "O3": "FP8"}  # name in the planner's rows -> the paper's name
MICRO_BATCH5 = {"7b": 2, "13b": 2, "175b": 1}  # at which Table 5 compares BF16 and FP8
RATE5 = "share of a step in weight-related communication"
WEIGHTS_SENT = "data-parallel, exposed"  # the planner's name for gradients and weights that are sent while no kernel runs
GRID, DATA_PARALLEL = (f"tools/bench/results/{name}.csv" for name in ("grid", "data_parallel"))
MEASURED = "counted"  # the piece that reports recorded results
# Flags that the columns of the grid already give, and the sharding over data-parallel ranks.
OF_THE_GRID = re.compile(
    r" --(sequence-parallel|use-distributed-optimizer|(tensor-model-parallel|pipeline-model-parallel|micro-batch)-size \d+)\b"
)
ZERO = "--use-distributed-optimizer"
LEVELS = {"BF16": "O0", "FP8": "O3"}


def configuration(model: str, level: str, flags: str = "") -> Config:
    """Return a preset at a level, with ZeRO as in the paper."""
    return parse_args(["--preset", model, "--opt-level", level, ZERO, *flags.split()])


def fullest(config: Config, gpus: int) -> float:
    """Return the memory of the process that uses most, in GiB."""
    return max(rank.total for rank in memory.plan(config, gpus)) / GIB


def weight_volume(config: Config, gpus: int) -> float:
    """Return the GiB that a rank sends per step for its weights under ZeRO: gradients to their owners, and weights from them.

    FP8-LM's "GB" are read as GiB throughout, since only then does its Table 7 agree with the shapes to the printed digit. BF16 sends FP32
    gradients and BF16 weights; FP8 one byte each for linear weights, two for other matrices, and FP32 for vectors.
    """
    ranks = config.parallel.axes(gpus).copies
    low = config.precision.recipe.fp8
    bytes_of = {"linear": 1 + 1, "matrix": 2 + 2, "vector": 4 + 4} if low else dict.fromkeys(("linear", "matrix", "vector"), 4 + 2)
    stages = config.parallel.pipeline_model_parallel_size
    most = max(sum(p.size * bytes_of[p.kind] for p in stage_parameters(config, stage)) for stage in range(stages))
    return most * (ranks - 1) / ranks / GIB


def table5(task: Task) -> Iterator[Finding]:
    """Report memory by the dry run and volume from shapes, on the paper's grids; and models on one GPU, from recorded
    results."""
    if task.piece != WHOLE:
        yield from queries.findings(f"on_card_{task.piece}")
        return
    for model, gpus in GRIDS.items():
        configs = {name: configuration(model, level) for name, level in LEVELS.items()}
        memory = {name: fullest(config, gpus) for name, config in configs.items()}
        volume = {name: weight_volume(config, gpus) for name, config in configs.items()}
        for quantity, ours, printed, unit in (("memory", memory, 0, "GiB"), ("weight-related volume", volume, -1, "GiB")):
            theirs = {name: paper("fp8lm.table5.second")[model][f"{name} {MICRO_BATCH5[model]}"][printed] for name in LEVELS}
            for name in LEVELS:
                yield Finding(f"{model}, {quantity}, {name}", ours[name], theirs[name], unit)
            saved, printed_saving = (100 * (1 - of["FP8"] / of["BF16"]) for of in (ours, theirs))
            yield Finding(f"{model}, {quantity} saved by FP8", saved, printed_saving, "%")
        yield from _beside5(model)


def _beside5(model: str) -> Iterator[Finding]:
    """Report the rest of Table 5 for a model's grid: the planner's predictions, and the paper's numbers that nothing here can be compared
    with."""
    for row in (row for row in read(PREDICTED) if (row["what"], row["model"]) == ("table5", model)):
        prefix = f"{model}, {PRECISIONS5[row['precision']]}, micro-batch {row['micro_batch']}"
        if row["micro_batch"] != str(MICRO_BATCH5[model]):
            yield Finding(f"{prefix}: memory", float(row["gib"]), float(row["paper_gb"]), "GiB")
        yield Finding(f"{prefix}: samples per second, predicted", float(row["samples_s"]), float(row["paper_samples_s"]))
    yield Finding(
        f"{model}, Transformer Engine: memory", NOT_MEASURED, paper("fp8lm.table5.second")[model][f"TE {MICRO_BATCH5[model]}"][0], "GiB"
    )
    predicted = {
        (PRECISIONS5[precision], micro_batch): _shares5(planner.planned5(model, gpus, micro_batch, precision), gpus)
        for name, gpus, micro_batch, precision, *_ in planner.TABLE_5
        if name == model
    }
    for case, (_, _, _, *papers, _) in paper("fp8lm.table5.second")[model].items():
        name, micro_batch = case.split()[0], int(case.split()[1])
        ours: tuple[float | str, float | str] = predicted.get((name, micro_batch), (NOT_MEASURED, NOT_MEASURED))
        suffix = ", predicted" if (name, micro_batch) in predicted else ""
        for quantity, value, theirs in zip(("MFU on the grid", RATE5), ours, papers, strict=True):
            yield Finding(f"{model}, {name}, micro-batch {micro_batch}: {quantity}{suffix}", value, theirs, "%")


def _shares5(one: Planned, gpus: int) -> tuple[float, float]:
    """Return the MFU of a planned grid relative to the peak of its GEMMs, and the share of its step in which only gradients and weights
    are sent, in percent."""
    tokens, config = one.config.global_batch_size(gpus) * one.config.model.seq_length, one.config
    flops = flops_per_token(config.model, vocabulary(config)) * tokens / one.step.total / gpus
    peak = rates_of(planner.GPU).gpu.peaks[config.precision.recipe.gemm is not None]
    return 100 * flops / (peak * 1e12), 100 * one.step.seconds.get(WEIGHTS_SENT, 0.0) / one.step.total


def figure1(task: Task) -> Iterator[Finding]:
    """Report whether 175B fits 32 GPUs, by context, and the largest GPT of 175B's width by number of GPUs."""
    for length in (2048, 4096):
        for name, level in LEVELS.items():
            held = fullest(configuration("175b", level, f"--seq-length {length}"), 32)
            claimed = {(4096, "FP8"): "fits"}.get((length, name))
            yield Finding(
                f"175B on 32 cards, {length} tokens, {name}", "fits" if held <= CARD - memory.RESERVED / GIB else "does not fit", claimed
            )
            yield Finding(f"175B on 32 cards, {length} tokens, {name}: fullest", held, unit="GiB")
    for gpus in (32, 64, 128, 256):
        for name, level in LEVELS.items():
            layers = largest(level, gpus)
            billions = 12 * layers * PRESETS["175b"]["hidden_size"] ** 2 / 1e9
            yield Finding(f"largest GPT on {gpus} cards, {name}", billions, unit="B parameters")


def largest(level: str, gpus: int) -> int:
    """Find the most layers, in steps of 4, of a GPT of 175B's width that fits at TP 8 x PP 4, by bisection."""
    low, high = 0, 128
    while high - low > 1:
        middle = (low + high) // 2
        fits = fullest(configuration("175b", level, f"--num-layers {4 * middle}"), gpus) <= CARD - memory.RESERVED / GIB
        low, high = (middle, high) if fits else (low, middle)
    return 4 * low


def activations(task: Task) -> Iterator[Finding]:
    """FP8-LM Table 7: a rank's communication volume per micro-batch."""
    if task.piece == MEASURED:
        yield from counted(read(GRID))
        return
    for model in ("13b", "175b"):
        for case, volume in table7.of_model(model).items():
            yield Finding(f"{model}, {case}", round(volume / GIB, 3), paper("fp8lm.table7")[model].get(case), "GiB")


def counted(rows: Sequence[Row]) -> Iterator[Finding]:
    """Report `bench_grid.py` runs with tensor parallelism: volume relative to shapes, and the share of a step in which only NCCL ran.

    The newest row of each case counts; for the share, the newest that was profiled, so the two can be from different days.
    """
    parallel = [row for row in rows if int(row["tp"] or 1) > 1]
    for row in table7.latest(parallel).values():
        scope, _ = table7.counted(row)
        yield Finding(f"{_on_grid(row)}: volume counted over shapes", scope / table7.shapes_of(row)[0], where=_on_gpus(row))
    for row in table7.latest([row for row in parallel if row["exposed_share"]]).values():
        share = 100 * float(row["exposed_share"])
        yield Finding(f"{_on_grid(row)}: share of a step in which only NCCL ran", share, unit="%", where=_on_gpus(row))
        yield Finding(f"{_on_grid(row)}: that step", float(row["ms"]), unit="ms", where=_on_gpus(row))


def _on_gpus(row: Row) -> Row:
    """Return the row with the number of GPUs in its GPU column."""
    return {**row, "gpu": f"{row['gpus']} x {row['gpu']}"}


def _on_grid(row: Row) -> str:
    return f"{row['preset']}, TP {row['tp']} x PP {row['pp']} x DP {row['dp']}, {OF_THE_GRID.sub('', row['case'])}"


def spread(task: Task) -> Iterator[Finding]:
    """FP8-LM Table 8: maximum minus minimum of the model state over all ranks."""
    if task.piece == MEASURED:
        yield from at_rest(read(DATA_PARALLEL))
        return
    for model in table8.DATA_PARALLEL:
        for method, printed in table8.METHODS.items():
            yield Finding(
                f"{model}, {method}: spread", round(table8.spread(model, method), 3), paper("fp8lm.table8")[model][printed], "GiB"
            )


def at_rest(rows: Sequence[Row]) -> Iterator[Finding]:
    """Report data-parallel runs with ZeRO: memory of a rank between two steps, and FP8's state computed from shapes.

    The newest row of each case and number of GPUs counts.
    """
    sharded = [row for row in rows if row["zero"] == "on"]
    newest = {(row["preset"], int(row["gpus"]), row["case"]): row for row in sharded}
    for (model, gpus, case), row in newest.items():
        prefix = f"{model}, DP {gpus}, {OF_THE_GRID.sub('', case)}: "
        least, most = float(row["rest_gib_min"]), float(row["rest_gib_max"])
        yield Finding(prefix + "memory of a rank at rest", most, unit="GiB", where=_on_gpus(row))
        yield Finding(prefix + "spread at rest", most - least, unit="GiB", where=_on_gpus(row))
    for model, gpus in dict.fromkeys((model, gpus) for model, gpus, _ in newest):
        size = PRESETS[model]
        state = table8.divide(table8.stage_tensors(size["num_layers"], size["hidden_size"], 1), gpus, "greedy-cut")
        yield Finding(f"{model}, DP {gpus}, greedy-cut from shapes: state of a rank", max(state) / GIB, unit="GiB")
        yield Finding(f"{model}, DP {gpus}, greedy-cut from shapes: spread", (max(state) - min(state)) / GIB, unit="GiB")
    of_table_5 = [row for row in sharded if row["preset"] in GRIDS and row["peak_gib_max"]]
    for row in {(row["preset"], row["gpus"], row["case"], row["micro_batch"]): row for row in of_table_5}.values():
        yield from _beside_the_dry_run(row)


def _beside_the_dry_run(row: Row) -> Iterator[Finding]:
    """Report the peak of the fullest rank in a step of one of Table 5's models, and the dry run's prediction for the same case."""
    gpus, micro_batch = int(row["gpus"]), int(row["micro_batch"])
    words = ["--preset", row["preset"], "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    words += ["--no-sequence-parallel"] if PRESETS[row["preset"]]["sequence_parallel"] else []
    words += ["--micro-batch-size", str(micro_batch), "--global-batch-size", str(gpus * micro_batch)]
    predicted = fullest(parse_args([*words, *case_flags(row["case"])]), gpus)
    prefix = f"{row['preset']}, DP {gpus}, {OF_THE_GRID.sub('', row['case'])}, micro-batch {micro_batch}: "
    yield Finding(prefix + "peak of the fullest rank", float(row["peak_gib_max"]), unit="GiB", where=_on_gpus(row))
    yield Finding(prefix + "peak of the fullest rank over the dry run's", float(row["peak_gib_max"]) / predicted, where=_on_gpus(row))


def neox(task: Task) -> Iterator[Finding]:
    """Collage Table 8: whether GPT-NeoX-30B fits at TP 8 x PP 2 on 16 GPUs of 40 GB, by option, micro-batch and sequence length."""
    cases: Sequence[tuple[int, int]] = ((1, 1024), (1, 2048), (2, 1024), (2, 2048))
    shape = "--num-layers 56 --hidden-size 6656 --num-attention-heads 64 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2"
    agree = 0
    for option, row in paper("collage.table8").items():
        for (micro_batch, length), fits in zip(cases, row, strict=True):
            # Sequence parallelism is off in the paper, and a step has 64 micro-batches of one sequence on one data-parallel copy.
            flags = f"{shape} --seq-length {length} --micro-batch-size {micro_batch} --global-batch-size 128 --train-iters 10 --lr 1e-4"
            config = parse_args([*flags.split(), "--precision", option, "--lr-warmup-iters", "1"])
            held = fullest(config, 16)
            ours, theirs = ("fits" if held <= 40 - memory.RESERVED / GIB else "does not fit"), {"y": "fits", "n": "does not fit"}[fits]
            agree += ours == theirs
            yield Finding(f"{option}, micro-batch {micro_batch}, {length} tokens", ours, theirs)
            yield Finding(f"{option}, micro-batch {micro_batch}, {length} tokens: fullest", held, unit="GiB")
    yield Finding("cells that agree", float(agree), 16.0)


# Collage Figure 4: preset, GPUs (all tensor parallel) and flags of its models
MODELS4 = {
    "125M": ("125m", 1, ""),
    "1.3B": ("1.3b", 8, ""),
    "2.7B": ("1.3b", 8, "--num-layers 32 --hidden-size 2560 --num-attention-heads 32"),
    "6.7B": ("7b", 8, ""),
    "OpenLLaMA-7B": ("llama2-7b", 8, "--seq-length 2048 --max-position-embeddings 2048"),
}


def saved_by_collage(task: Task) -> Iterator[Finding]:
    """Collage Figure 4 on its own grids: peak memory of each option in its runs, which have 128 micro-batches of one sequence, and what
    light and plus save against D."""
    saved: dict[str, dict[str, float]] = {"light": {}, "plus": {}}
    for model, (preset, gpus, flags) in MODELS4.items():
        held = {}
        for option, precision in NAMES.items():
            words = f"--preset {preset} {flags} --precision {precision} --tensor-model-parallel-size {gpus}"
            held[option] = fullest(parse_args([*words.split(), "--micro-batch-size", "1", "--global-batch-size", "128"]), gpus)
            yield Finding(f"{option}, {model}: fullest", held[option], unit="GiB")
        for option, models in saved.items():
            models[model] = 100 * (1 - held[option] / held["d"])
            claimed = paper("collage.figure4.openllama")[option] if model == "OpenLLaMA-7B" else None
            yield Finding(f"{option}, {model}: saved against D", models[model], claimed, "%")
    for option, (*gpts, llama) in ((option, list(models.values())) for option, models in saved.items()):
        yield Finding(f"{option}: saved against D, mean of the GPTs", sum(gpts) / len(gpts), paper("collage.figure4.gpts")[option], "%")
        yield Finding(
            f"{option}: saved against D, mean of all models", sum((*gpts, llama)) / len(MODELS4), paper("collage.figure4.all")[option], "%"
        )
