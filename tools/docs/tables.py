"""The published tables: which rows each one selects, and its columns. No number in them is typed by hand."""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tools.docs import gradient_sums, hardware, losses, shapes, state_formats
from tools.docs.cells import BENCH, PEERS, PRECISIONS, REPRODUCE, Cell, Listing, Table, case, code, column, kilo, of, pick, speed_columns
from tools.docs.evidence import COMPUTED, Row
from tools.reproduce import throughput

STEP, GRID, PARALLEL, KERNELS, MEMORY = (f"{BENCH}/{name}.csv" for name in ("step", "grid", "data_parallel", "kernels", "memory"))
COAT_MEMORY = f"{REPRODUCE}/coat_memory.csv"
BASE, ALIAS = "O0", "bf16"  # one precision, under its two names
RUN = "d77a990"  # of whole steps, ours and the baselines' together
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FASTER = 1.05  # a table with an older tree says so if a newer one is faster by this factor
PEAKS = (989.0, 1979.0)  # TFLOP/s of an H100 or H200, dense: BF16 and FP8


SUMMED_UP = ("megatron bf16", "megatron te-delayed", "torchao bf16", "torchao ao-tensorwise")
LARGER = ("llama2-7b", "7b", "llama3-8b", "qwen3-8b", "13b", "175b")


def whole_step(row: Row) -> bool:
    """Return whether a row is a step of GPT-1.3B with micro-batch 4 on one H200."""
    return (row["gpu"], row["preset"], row["micro_batch"], row["gpus"]) == (H200, "1.3b", "4", "1")


def same_case(case: str, preset: str = "") -> tuple[str, ...]:
    """Return a case and its model as one key of what is computed: `bf16` is O0, which a trial of FP8 GEMMs does not change.

    Flags may be part of the case or of the model.
    """
    words = [BASE if word == ALIAS else word for word in f"{case} {preset}".split()]
    text = " ".join(words)
    return tuple(sorted((re.sub(r" --fp8-min-gain \S+", "", text) if BASE in words else text).split()))


def newer_o0(rows: Iterable[Row]) -> str:
    """Return a sentence for a table with rows of O0 from before the last tree that made it faster; else empty."""
    steps = [row for row in pick(STEP, whole_step) if row["case"] == BASE]
    trees = [(before, row) for before, row in itertools.pairwise(steps) if before["commit"] != row["commit"]]
    faster = [(before, row) for before, row in trees if float(before["ms"]) >= FASTER * float(row["ms"])]
    if not faster:
        return ""
    before, since = faster[-1]
    if not any(BASE in same_case(row.get("case") or row.get("precision", "")) and row["date"] < since["date"] for row in rows):
        return ""
    return (
        f"BF16 (`O0`) was measured on an older tree here: since {since['commit']} its step of GPT-1.3B takes {float(since['ms']):.0f} ms "
        f"on one H200, and {float(before['ms']):.0f} ms before. Speedups over BF16 that are read off this table are too large."
    )


def mfu(row: Row) -> str:
    """Return the model FLOPs utilization of the BF16 peak and of the FP8 peak; empty for a baseline without FLOPs."""
    return "" if not row["tflops"] else " / ".join(f"{100 * float(row['tflops']) / peak:.0f} %" for peak in PEAKS)


def best_and_same_run() -> list[tuple[Row, Row | None]]:
    """Return for each level and baseline the fastest recorded row, and the row of the run in which all were measured back to back."""
    order = ["O0", "O1", "O2", "O3", *(peer for peer in PEERS if peer in SUMMED_UP)]
    pairs: list[tuple[Row, Row | None]] = []
    for name in order:
        rows = [row for row in pick(STEP, whole_step) if row["case"] == name]
        best = min(rows, key=lambda row: float(row["ms"]))
        pairs.append((best, next((row for row in rows if row["commit"] == RUN), None)))
    return pairs


def summary() -> Table:
    """Whole steps of GPT-1.3B: the fastest run recorded for each system, and the run in which all were measured back to back."""
    pairs = best_and_same_run()
    cells = [
        [case(best), column("ms", 0)(same) if same else "not measured", column("ms", 0)(best), kilo("tokens_s_gpu")(best), mfu(best),
         column("peak_gib", 1)(best)]
        for best, same in pairs
    ]  # fmt: skip
    columns = [f"ms/step, run {RUN}", "ms, best", "tokens/s", "MFU of 989 / 1,979 TFLOP/s", "peak GiB"]
    rows = [row for pair in pairs for row in pair if row is not None]
    return Table(["GPT-1.3B, one H200", *columns], cells, [(STEP, rows)])


def steps(commit: str, keep: Callable[[Row], bool] = lambda row: True, gpu: str = H200) -> Table:
    """The whole steps of one commit on one kind of GPU."""
    return _steps(pick(STEP, lambda row: (row["commit"], row["gpu"]) == (commit, gpu) and keep(row)))


def larger_steps() -> Table:
    """Whole steps of models of 7B and more, or of layers as wide, on one H200: the newest row of each case."""
    rows = pick(STEP, lambda row: (row["gpu"], row["gpus"]) == (H200, "1") and row["preset"].split()[0] in LARGER)
    newest = {(*same_case(row["case"], row["preset"]), row["micro_batch"]): row for row in rows}
    return _steps(sorted(newest.values(), key=lambda row: (row["preset"], row["case"], int(row["micro_batch"]))))


def _steps(rows: Sequence[Row]) -> Table:
    columns = {
        "case": case, "model": column("preset"), "micro-batch": column("micro_batch"), "ms/step": column("ms", 1),
        "tokens/s/GPU": kilo("tokens_s_gpu"), "MFU of 989 / 1,979": mfu, "peak GiB": column("peak_gib", 1),
        "at rest GiB": column("rest_gib", 1),
    }  # fmt: skip
    return replace(of(STEP, rows, columns), note=newer_o0(rows))


def coat_parts() -> Table:
    """COAT's two parts at other levels, compared with each commit's plain O3."""
    columns = {"case": case, "commit": column("commit"), "ms/step": column("ms", 1), "peak GiB": column("peak_gib", 1)}
    rows = pick(STEP, lambda row: row["commit"] in ("484bfc7", "849bdfd"))
    return replace(of(STEP, rows, columns), note=newer_o0(rows))


def coat_memory() -> Table:
    """Speed and memory of BF16, O3 and COAT: the newest steps at micro-batch 4, and the largest micro-batches of an older search."""
    names = throughput.CASES
    newest = throughput.together(f"1.3b {throughput.NO_TRIAL}", 4, names)
    rows = pick(COAT_MEMORY, lambda row: bool(row["ms"]))
    largest = {name: max((row for row in rows if row["case"] == name), key=_micro_batch) for name in names}
    cells = []
    for some in (newest, largest):
        base = some[names[0]]
        for row in (some[name] for name in names):
            faster, smaller = float(row["tokens_s_gpu"]) / float(base["tokens_s_gpu"]), float(base["peak_gib"]) / float(row["peak_gib"])
            times = [f"{faster:.2f}", f"{smaller:.2f}" if row["micro_batch"] == base["micro_batch"] else ""]
            cells.append([f"`{row['case']}`", row["micro_batch"], f"{float(row['ms']):.0f}", kilo("tokens_s_gpu")(row),
                          f"{float(row['peak_gib']):.1f}", *times, row["commit"]])  # fmt: skip
    base, earlier = newest[names[0]], next(row for row in rows if (row["case"], row["micro_batch"]) == (names[0], "4"))
    note = (
        f"The largest micro-batches were measured at {earlier['commit']}, where BF16 took {float(earlier['ms']):.0f} ms per step at "
        f"micro-batch 4, and {float(base['ms']):.0f} at {base['commit']}: their speedups are over the slower BF16, not measured since."
    )
    columns = ["", "micro-batch", "ms/step", "tokens/s", "peak GiB", "times BF16's speed", "times less memory", "commit"]
    return Table(columns, cells, [(STEP, list(newest.values())), (COAT_MEMORY, list(largest.values()))], note=note)


def _micro_batch(row: Row) -> int:
    return int(row["micro_batch"])


def data_parallel(commit: str) -> Table:
    """Data parallelism over several H200s."""
    columns = {
        "case": case, "GPUs": column("gpus"), "NVLink": column("p2p"), "ms/step": column("ms", 0), "tokens/s/GPU": kilo("tokens_s_gpu"),
        "at rest GiB": column("rest_gib_max", 1), "bytes sent per parameter: all": column("wire_bytes_param", 2),
        "linear weights": column("wire_linear_bytes_param", 2), "exposed %": column("exposed_share", 1, 100),
    }  # fmt: skip
    rows = pick(PARALLEL, lambda row: row["commit"] == commit)
    return replace(of(PARALLEL, rows, columns), note=newer_o0(rows))


def best_data_parallel() -> Table:
    """Two H200s: the fastest and the slowest row of each case of GPT-1.3B."""
    rows = pick(PARALLEL, lambda row: row["gpus"] == "2" and row["p2p"] == "on" and row["preset"] == "1.3b")
    cells, used = [], []
    for name in ("O0 --use-distributed-optimizer", "O1", "O2", "O3", "megatron bf16", "megatron te-delayed"):
        measured = sorted((row for row in rows if row["case"] == name), key=lambda row: float(row["ms"]))
        best, worst = measured[0], measured[-1]
        used += [best, worst]
        cells.append([case(best), f"{float(best['ms']):.0f}", f"{float(worst['ms']):.0f}", kilo("tokens_s_gpu")(best), best["commit"]])
    columns = ["", "best ms/step", "slowest recorded", "tokens/s/GPU at best", "commit of the best"]
    return Table(columns, cells, [(PARALLEL, used)], note=newer_o0(used))


def optimizer() -> Table:
    """The update alone, in a CUDA graph: the newest row of each precision."""
    columns = {
        "precision": column("level"), "state": lambda row: "COAT" if "coat" in row["case"] else "", "ms": column("ms", 2),
        "bytes per parameter": column("bytes_per_param", 1), "share of copy speed": column("share", 2), "commit": column("commit"),
    }  # fmt: skip
    name = f"{BENCH}/optimizer.csv"
    newest = {row["level"]: row for row in pick(name, lambda row: row["case"] == "step in a graph" and row["preset"] == "1.3b")}
    return of(name, list(newest.values()), columns)


def memory() -> Table:
    """Predictions of the memory report, and measurements."""
    columns = {
        "level": code("case"), "saved activations": column("save_activations"), "what": column("what"), "unit": column("unit"),
        "predicted": column("predicted"), "measured": column("measured"), "difference %": column("difference_percent", 1),
    }  # fmt: skip
    return of(MEMORY, newest_memory(), columns)


def newest_memory() -> list[Row]:
    """Return the newest row of each precision, way to save activations and quantity; `bf16` and O0 are one precision."""
    keys = ("recompute", "bf16_linears", "save_activations", "what")
    return list({(same_case(row["case"]), *(row[key] for key in keys)): row for row in pick(MEMORY)}.values())


def memory_error() -> Table:
    """The largest difference between prediction and measurement."""
    rows = newest_memory()
    worst = {
        what: max((row for row in rows if row["what"] == what), key=lambda row: abs(float(row["difference_percent"])))
        for what in ("peak", "rest", "activations, layer")
    }
    cells = [[what, f"`{row['case']}`", f"{float(row['difference_percent']):.2f}"] for what, row in worst.items()]
    return Table(["what", "largest difference at", "%"], cells, [(MEMORY, rows)])


def kernels(rate: str) -> Table:
    """Kernels bound by arithmetic (`tflops`) or by memory (`tb_s`): the last measurement of each."""
    columns = {
        "kernel": column("kernel"), "tokens": column("tokens"), "hidden": column("hidden"), "us": column("us", 1),
        {"tflops": "TFLOP/s", "tb_s": "TB/s"}[rate]: column(rate), "share of the peak": column("share", 2), "commit": column("commit"),
    }  # fmt: skip
    last = {(row["kernel"], row["tokens"], row["hidden"]): row for row in pick(KERNELS, lambda row: bool(row[rate]))}
    return of(KERNELS, list(last.values()), columns)


def in_both(kind: str) -> Table:
    """Kernels of one kind, "GEMM" or "linear", in FP8 and BF16: the last measurement of each."""
    last = {row["kernel"]: row for row in pick(KERNELS, lambda row: f" {kind}, " in row["kernel"])}
    cells, used = [], []
    for name in dict.fromkeys(kernel.split(", ")[1] for kernel in last):
        both = [last[f"{precision} {kind}, {name}"] for precision in ("FP8", "BF16")]
        used += both
        gain = float(both[1]["us"]) / float(both[0]["us"])
        cells.append([name, *(row["us"] for row in both), *(row["tflops"] for row in both), f"{gain:.2f}"])
    columns = ["layer" if kind == "linear" else "GEMM", "FP8, us", "BF16, us", "FP8, TFLOP/s", "BF16, TFLOP/s", "times BF16's speed"]
    return Table(columns, cells, [(KERNELS, used)])


def saved_activations() -> Table:
    """Measured MiB that one layer saves for backward, by part."""
    rows = [row for row in newest_memory() if row["what"].startswith("activations, ") and not row["recompute"] and not row["bf16_linears"]]
    parts = list(dict.fromkeys(row["what"] for row in rows))
    by = {(row["case"], row["save_activations"], row["what"]): row["measured"] for row in rows}
    kinds = sorted(dict.fromkeys(kind[:2] for kind in by), key=lambda kind: -float(by[*kind, "activations, layer"]))
    cells = [[f"`{case}`", f"`{kept}`", *(f"{float(by[case, kept, part]):.1f}" for part in parts)] for case, kept in kinds]
    columns = ["precision", "`--save-activations`", *(part.removeprefix("activations, ") for part in parts)]
    return Table(columns, cells, [(MEMORY, rows)])


def plain(name: str, columns: dict[str, Cell]) -> Table:
    """Every row of a file."""
    return of(name, pick(name), columns)


def table7() -> Table:
    """Activations that a rank sends, from shapes: the paper's Table 7."""
    name = COMPUTED[0]
    columns = {
        "model": column("model"), "TP": column("tp"), "case": column("case"), "GiB per micro-batch": column("scope_gib", 2),
        "change": column("scope_change"), "paper GB": column("paper_gb"), "paper change": column("paper_change"),
        "all transfers GiB": column("all_gib", 2),
    }  # fmt: skip
    return of(name, pick(name, lambda row: row["source"] == "computed"), columns)


def table7_measured() -> Table:
    """Activations that a rank sent, counted during training: Table 7 compared with the prediction from shapes."""
    name = COMPUTED[0]
    rows = measured_of_table7()
    columns = {
        "model": column("model"), "TP x PP x DP": lambda row: f"{row['tp']} x {row['pp']} x {row['dp']}", "case": case,
        "cards": lambda row: row["gpu"].replace("NVIDIA ", "").removesuffix(" 80GB HBM3"),
        "GiB per micro-batch, counted": column("scope_gib", 2), "from shapes": column("shapes_scope_gib", 2),
        "change": column("scope_change"),
        "all transfers GiB, counted": column("all_gib", 2), "all from shapes": column("shapes_all_gib", 2),
    }  # fmt: skip
    return of(name, rows, columns)


def measured_of_table7() -> list[Row]:
    """Return the rows that were counted, with date and commit from `source`; `gpu` includes the number of GPUs."""
    measured: list[Row] = []
    for row in pick(COMPUTED[0], lambda row: row["source"] != "computed"):
        date, commit = row["source"].split()
        measured.append({**row, "date": date, "commit": commit})
    return measured


def table8() -> Table:
    """How evenly states spread over ranks, from shapes: the paper's Table 8."""
    name = COMPUTED[1]
    columns = {
        "model": column("model"), "TP": column("tp"), "PP": column("pp"), "DP": column("dp"), "method": column("method"),
        "least GiB": column("min_gib", 2), "most GiB": column("max_gib", 2), "spread": column("spread", 3),
        "paper's row": column("paper_row"), "paper's spread GB": column("paper_spread"),
    }  # fmt: skip
    return of(name, pick(name, lambda row: row["method"] != "-"), columns)


def precisions() -> Table:
    """Every precision on one model and text."""

    def loss(row: Row) -> str:
        middle = f"{float(row['valid_loss']):.4f}"
        return middle if row["seeds"] == "1" else f"{middle} ({float(row['least']):.4f} to {float(row['most']):.4f})"

    columns = {
        "`--precision`": code("precision"), "seeds": column("seeds"), "validation loss": loss,
        "% from BF16 of the same seeds, 95 % interval": lambda row: losses.shown(losses.paired(row["precision"]).relative),
        "tokens/s": column("tokens_s", 0, 1e-3, "k"), "peak GiB": column("peak_gib", 2),
        "states, bytes per parameter": column("state_bytes_param", 1),
    }  # fmt: skip
    return replace(plain(PRECISIONS, columns), note=newer_o0(pick(PRECISIONS)))


def blockwise_loss() -> Table:
    """Operands cast in blocks: last validation loss of each seed."""
    name = f"{REPRODUCE}/blockwise/runs.csv"
    rows = pick(name)
    seeds = sorted({row["seed"] for row in rows})
    by = {(row["precision"], row["seed"]): row["valid_loss"] for row in rows}
    cells = [[f"`{kind}`", *(by.get((kind, seed), "") for seed in seeds)] for kind in dict.fromkeys(row["precision"] for row in rows)]
    return Table(["`--precision`", *(f"seed {seed}" for seed in seeds)], cells, [(name, rows)])


def coat_states() -> Table:
    """COAT's moments on a small trained GPT: range and error, all tensors."""
    name = f"{REPRODUCE}/coat_states.csv"
    columns = {
        "what": column("what"), "m": column("m"), "v": column("v"), "expanded": column("expand"),
        "median of the range": column("range_median"), "the paper's": column("page_range"),
        "median error of a group's update %": column("group_error", 1, 100),
        "SQNR dB": column("sqnr_db", 1),
    }  # fmt: skip
    return of(name, pick(name, lambda row: row["weights"] == "all"), columns)


def coat_activations() -> Table:
    """COAT's saved activations on a small trained GPT."""
    name = f"{REPRODUCE}/coat_activations.csv"
    columns = {
        "what": column("what"), "kept as": column("kept"), "bytes": column("bytes", 2), "SQNR dB": column("sqnr_db", 1),
        "worst token dB": column("worst_token_db", 1),
    }  # fmt: skip
    return of(name, pick(name, lambda row: bool(row["sqnr_db"])), columns)


def generation() -> Table:
    """Tokens/s of generation, ours and transformers'."""
    name = f"{BENCH}/generate.csv"
    columns = {
        "case": code("case"), "model": column("preset"), "prompts": column("batch"), "tokens of a prompt": column("prompt"),
        "tokens/s of prompts": kilo("prefill_tokens_s"), "tokens/s appended": column("tokens_s", 0), "ms/token": column("ms_token", 1),
        "peak GiB": column("peak_gib", 1),
    }  # fmt: skip
    return of(name, pick(name, lambda row: True), columns)


def attention() -> Table:
    """Attention in FP8 and BF16: microseconds of both, and FP8's error."""
    name, keys = f"{BENCH}/attention.csv", ("batch", "heads", "groups", "tokens", "inputs")
    by_shape: dict[tuple[str, ...], dict[tuple[str, str, str], Row]] = {}
    for row in pick(name):
        by_shape.setdefault(tuple(row[key] for key in keys), {})[row["what"], row["pass"], row["precision"]] = row
    timed = [("kernel", "forward"), ("kernel", "forward and backward"), ("layer", "forward and backward")]
    cells = []
    for shape, of_shape in by_shape.items():
        times = [" / ".join(f"{float(of_shape[*what, precision]['us']):.0f}" for precision in ("bf16", "fp8")) for what in timed]
        lost = of_shape["kernel", "forward", "fp8"]
        cells.append([*shape, *times, " / ".join(lost[key] for key in ("sqnr_o", "sqnr_dq", "sqnr_dk", "sqnr_dv"))])
    times = ["kernel forward, us BF16 / FP8", "kernel, forward and backward", "layer, forward and backward"]
    columns = ["batch", "heads", "groups", "tokens", "inputs", *times]
    return Table([*columns, "SQNR of O / dQ / dK / dV, dB"], cells, [(name, pick(name))])


def fp16_amp() -> Table:
    """FP16 with loss scaling: a small detector after 300 steps."""
    name = f"{REPRODUCE}/fp16_amp.csv"
    columns = {
        "Apex level": column("level"), "loss times": column("factor"), "loss scale": column("loss_scale"), "loss": column("loss", 4),
        "average precision": column("average_precision", 3), "gradient that is 0, %": column("zeros", 1, 100),
    }  # fmt: skip
    return of(name, pick(name, lambda row: row["what"] == "detection"), columns)


TABLES: dict[str, Callable[[], Table | Listing]] = {
    "summary": summary,
    "steps": lambda: steps(RUN),
    "blockwise-steps": lambda: steps("130f7fa"),
    "peer-steps": lambda: steps("0463af1", whole_step),
    "option-steps": lambda: steps("8136b16", whole_step),
    "fp8-all-steps": lambda: steps("7737541", whole_step),
    "large-steps": larger_steps,
    "h100-steps": lambda: steps("bb74ea5", gpu=H100),
    "attention": attention,
    "generate": generation,
    "coat-memory": coat_memory,
    "coat-parts": coat_parts,
    "data-parallel-best": best_data_parallel,
    "data-parallel": lambda: data_parallel("d2fde52"),
    "data-parallel-four": lambda: data_parallel("b39cb72"),
    "optimizer": optimizer,
    "memory": memory,
    "memory-error": memory_error,
    "compile": lambda: plain(f"{BENCH}/compile.csv", speed_columns()),
    "checkpoint": lambda: plain(
        f"{BENCH}/checkpoint.csv",
        {"case": code("case"), "bytes per parameter": column("bytes_param", 2), "save s": column("save_s", 0),
         "load s": column("load_s", 0), "first stall s": column("first_stall_s", 1), "stall s": column("stall_s", 2),
         "ms/step": column("ms", 1), "while it writes": column("ms_saving", 1), "written after s": column("write_s", 0)},
    ),
    "recorder": lambda: plain(
        f"{BENCH}/recorder.csv",
        {"case": code("case"), "ms/step": column("ms", 1), "recorded ms": column("recorded_ms", 1), "every": column("interval"),
         "share of a run %": column("share_percent", 2), "peak GiB": column("peak_gib", 1), "recorded GiB": column("recorded_peak_gib", 1)},
    ),
    "kernels-arithmetic": lambda: kernels("tflops"),
    "kernels-memory": lambda: kernels("tb_s"),
    "linear-speed": lambda: in_both("linear"),
    "gemm-speed": lambda: in_both("GEMM"),
    "saved-activations": saved_activations,
    "support": hardware.support,
    "bytes-per-parameter": shapes.bytes_per_parameter,
    "memory-7b": shapes.memory_7b,
    "dry-run-7b": shapes.dry_run_7b,
    "refused-7b": shapes.refused_7b,
    **losses.TABLES,
    "table7": table7,
    "table7-measured": table7_measured,
    "table8": table8,
    "fig7": gradient_sums.over_ranks,
    "fig7-orders": gradient_sums.by_order,
    "precisions": precisions,
    "blockwise-loss": blockwise_loss,
    "coat-states": coat_states,
    "moment-shares": state_formats.moments,
    "master-shares": state_formats.masters,
    "coat-activations": coat_activations,
    "fp16-amp": fp16_amp,
    "fp16-lstm": lambda: plain(
        f"{REPRODUCE}/fp16_lstm.csv",
        {"Apex level": column("level"), "loss scale": column("loss_scale"), "validation loss": column("valid_loss", 4),
         "gradient that is 0, %": column("zeros", 1, 100), "gradient below 2^-24, %": column("below_at_1", 1, 100),
         "at loss scale 8": column("below_at_8", 1, 100), "at loss scale 128": column("below_at_128", 1, 100)},
    ),
}  # fmt: skip
