"""Tables of post-training: fine-tuning, RLHF, encoders, evaluation. A table without recorded measurements says only that."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.lm.config.blend_file import number_of
from megatron.lm.evaluation.paired_difference import interval
from tools.docs.cells import BENCH, Absent, Cell, Table, code, column, of
from tools.docs.evidence import ROOT, Row, read

SFT, DPO, PPO, ENCODERS, BOOLQ, EVALUATION, CURVES = (
    f"{BENCH}/{name}.csv" for name in ("sft", "dpo", "ppo", "encoders", "boolq", "evaluation", "post_curves")
)

STARTS = f"{BENCH}/sft_starts.csv"  # the first steps of a fine-tuning, with BF16 and with FP32 weights

BASE = "O0"  # the level that others are compared with
SPEEDS = ("tokens_per_s", "s_per_step", "rollout_tokens_per_s", "pairs_per_s")  # whose outliers are the host's: medians over seeds
RUN = ("model", "recipe", "dtype", "seq_length", "global_batch_size", "steps", "seed")  # what tells runs of fine-tuning apart


def rows_of(name: str) -> Sequence[Row]:
    """Return the rows of a file; none if it does not exist yet."""
    return read(name) if (ROOT / name).is_file() else ()


def newest_runs(rows: Sequence[Row], key: str) -> list[Row]:
    """Return the rows of the newest commit and card of each value under `key`, such as each model."""
    last = {row[key]: (row["commit"], row["gpu"]) for row in rows}
    return [row for row in rows if (row["commit"], row["gpu"]) == last[row[key]]]


def without_lora(rows: Sequence[Row]) -> list[Row]:
    """Return the runs of fine-tuning that trained all weights."""
    return [row for row in rows if not int(row.get("lora_rank") or 0)]


def full_runs(rows: Sequence[Row]) -> list[Row]:
    """Return the newest runs of each model that trained all weights; of several of a seed the last."""
    newest = newest_runs(without_lora(rows), "model")
    return list({tuple(row.get(key) for key in RUN): row for row in newest}.values())


def over_seeds(rows: Sequence[Row], same: Sequence[str]) -> list[Row]:
    """Return a row for each combination of values under `same`: the means over seeds, of speeds the medians, and `seeds`, their number.

    Of several rows of a seed the last counts. A column without a number in each row, such as a speed of runs that shared a card, has the
    value of the first seed.
    """
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in same), {})[row["seed"]] = row
    means: list[Row] = []
    for group in (list(runs.values()) for runs in groups.values()):
        mean = dict(group[0]) | {"seeds": str(len(group))}
        for key in (key for key in mean if key not in (*same, "seed", "seeds")):
            numbers = [number for row in group if (number := number_of(row[key])) is not None]
            if len(numbers) == len(group) > 1:
                mean[key] = str((statistics.median if key in SPEEDS else statistics.fmean)(numbers))
        means.append(mean)
    return means


def _gain(rows: Sequence[Row], key: str, same: Sequence[str]) -> Cell:
    """Return a cell with the difference of a value from O0's in the same setting, in percent."""

    def cell(row: Row) -> str:
        base = next((other for other in rows if other["recipe"] == BASE and all(other[name] == row[name] for name in same)), None)
        if base is None or base is row or not row[key] or not base[key]:
            return ""
        return f"{100 * (float(row[key]) / float(base[key]) - 1):+.0f} %"

    return cell


def _peak(row: Row) -> str:
    """Return GiB from bytes per parameter."""
    return f"{float(row['peak_bytes']) * int(row['parameters']) / 2**30:.2f}" if row["peak_bytes"] else ""


def _states(row: Row) -> str:
    return f"{float(row['master_bytes']) + float(row['moment_bytes']):.2f}"


def sft() -> Table | Absent:
    """FP8-LM, Table 3: loss, memory and throughput of each level, compared with O0: seeds of each model's newest commit, no LoRA."""
    runs = full_runs(rows_of(SFT))
    same = ("model", "dtype", "seq_length", "global_batch_size", "steps", "commit", "gpu")
    rows = sorted(over_seeds(runs, ("recipe", "parameters", *same)), key=lambda row: (int(row["parameters"]), row["recipe"]))
    columns: dict[str, Cell] = {
        "level": code("recipe"), "model": column("model"), "parameters M": column("parameters", 0, 1e-6), "steps": column("steps"),
        "seeds": column("seeds"), "loss": column("loss_last", 3), "held out, before": column("valid_loss_before", 3),
        "after": column("valid_loss_after", 3),
        "tokens/s": column("tokens_per_s", 0), "from O0": _gain(rows, "tokens_per_s", same), "peak GiB": _peak,
        "memory from O0": _gain(rows, "peak_bytes", same), "bytes per parameter: weights": column("weight_bytes", 2),
        "states": _states, "gradients": column("gradient_bytes", 2),
    }  # fmt: skip
    return replace(of(SFT, rows, columns), sources=[(SFT, runs)]) if rows else Absent(SFT)


def starts() -> Table | Absent:
    """Falls of the held-out loss in the first steps of a fine-tuning, by level and dtype of the weights, and relative to the first case of
    the same seed."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows_of(STARTS):
        cases.setdefault((row["recipe"], row["dtype"]), {})[row["seed"]] = row
    if not cases:
        return Absent(STARTS)
    falls = {name: {seed: _fall(row) for seed, row in runs.items()} for name, runs in cases.items()}
    base = next(iter(falls.values()))
    cells = []
    for (level, dtype), fall in falls.items():
        ratio = interval([value / base[seed] for seed, value in fall.items()])
        half = "" if ratio.half_width is None else f" ({' to '.join(f'{end:.2f}' for end in ratio.ends)})"
        cells.append([f"`{level}`", dtype.upper(), str(len(fall)), f"{statistics.fmean(fall.values()):.4f}", f"{ratio.mean:.2f}{half}"])
    columns = ["level", "weights of the model", "seeds", "fall of the held-out loss", "times the first line's, 95 % interval"]
    return Table(columns, cells, [(STARTS, rows_of(STARTS))])


def _fall(row: Row) -> float:
    return float(row["valid_loss_before"]) - float(row["valid_loss_after"])


def dpo() -> Table | Absent:
    """Direct preference optimization at each level."""
    rows = rows_of(DPO)
    same = ("model", "dtype", "global_batch_size", "steps", "seed", "commit", "gpu")
    columns: dict[str, Cell] = {
        "level": code("recipe"), "steps": column("steps"), "loss, first step": column("loss_first", 4), "loss": column("loss_last", 4),
        "chosen above rejected": column("accuracy_last", 2), "pairs/s": column("pairs_per_s", 1),
        "policy MiB": column("policy_weight_mib", 0), "reference MiB": column("reference_weight_mib", 0),
        "states MiB": column("state_mib", 0), "from O0": _gain(rows, "state_mib", same), "peak MiB": column("peak_mib", 0),
    }  # fmt: skip
    return of(DPO, rows, columns) if rows else Absent(DPO)


def ppo() -> Table | Absent:
    """FP8-LM, Table 4: reward, and memory of the weights and states of all models: over the seeds of each reward's newest commit."""
    runs = newest_runs(rows_of(PPO), "reward")
    same = ("model", "dtype", "reward", "global_batch_size", "steps", "commit", "gpu")
    rows = over_seeds(runs, ("recipe", *same))
    columns: dict[str, Cell] = {
        "level": code("recipe"), "reward": column("reward"), "steps": column("steps"), "seeds": column("seeds"),
        "first 10 steps": column("reward_first", 3), "last 10": column("reward_last", 3), "kl": column("kl_last", 2),
        "s/step": column("s_per_step", 2), "weights MiB": column("weight_mib", 0), "from O0": _gain(rows, "weight_mib", same),
        "states MiB": column("state_mib", 0), "states from O0": _gain(rows, "state_mib", same), "gradients MiB": column("gradient_mib", 0),
        "peak MiB": column("peak_mib", 0),
    }  # fmt: skip
    return replace(of(PPO, rows, columns), sources=[(PPO, runs)]) if rows else Absent(PPO)


def encoders() -> Table | Absent:
    """Collage, Table 3: perplexity of the masked tokens after each phase."""
    rows = rows_of(ENCODERS)
    columns: dict[str, Cell] = {
        "`PRECISION`": code("precision"), "phase": column("phase"), "steps": column("steps"), "training loss": column("train_loss", 3),
        "validation loss": column("valid_loss", 3), "perplexity": column("ppl", 1), "peak GiB": column("peak_gib", 2),
    }  # fmt: skip
    return of(ENCODERS, rows, columns) if rows else Absent(ENCODERS)


def boolq() -> Table | Absent:
    """Collage, Table 4, with BoolQ for GLUE."""
    rows = rows_of(BOOLQ)
    columns: dict[str, Cell] = {
        "pre-trained at": code("precision"), "tuned at": code("tuned_at"), "seed": column("seed"), "steps": column("steps"),
        "loss, first tenth": column("loss_first", 3), "last tenth": column("loss_last", 3), "accuracy %": column("accuracy", 1, 100),
        "always the more common answer %": column("majority", 1, 100),
    }  # fmt: skip
    return of(BOOLQ, rows, columns) if rows else Absent(BOOLQ)


def evaluation() -> Table | Absent:
    """A line per task and metric, a column per model; of several rows the last."""
    rows = rows_of(EVALUATION)
    if not rows:
        return Absent(EVALUATION)
    metrics = ("acc", "acc_norm", "bits_per_byte", "perplexity")
    last = {(row["task"], row["metric"], row["model"]): row for row in rows if row["metric"] in metrics}
    models = list(dict.fromkeys(row["model"] for row in last.values()))
    cells = []
    for task, metric in dict.fromkeys(key[:2] for key in last):
        row_of_models = [last.get((task, metric, model)) for model in models]
        cells.append([task, metric, *("" if row is None else _measured(row) for row in row_of_models)])
    heads = [f"`{model}`" for model in models]
    return Table(["task", "metric", *heads], cells, [(EVALUATION, list(last.values()))])


def _measured(row: Row) -> str:
    digits = 3 if row["metric"] in ("acc", "acc_norm") else 4
    return f"{float(row['value']):.{digits}f}" + (f" ± {float(row['stderr']):.3f}" if row["stderr"] else "")


TABLES: dict[str, Callable[[], Table | Absent]] = {
    "sft": sft, "sft-starts": starts, "dpo": dpo, "ppo": ppo, "encoders": encoders, "boolq": boolq, "evaluation": evaluation,
}  # fmt: skip
