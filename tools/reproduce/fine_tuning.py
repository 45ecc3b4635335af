"""Findings of FP8-LM's Tables 3 and 4: fine-tuned models at each level, by SFT, DPO and PPO, compared with O0 by seed.

Only runs of one commit and card are compared. Of SFT and PPO these are the runs of the newest commit of each model or reward. Of DPO over
learning rates, seeds ran at different commits, but all levels of a seed at the same one. Runs of the same seed see the same data in the
same order, so differences are taken seed by seed; with several seeds their mean has a 95 % interval. Speeds do not depend on the seed, and
their outliers are the host's, so theirs are medians.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from megatron.lm.evaluation.paired_difference import Interval, interval, paired_difference
from tools.measurements import Row, read
from tools.reproduce import recorded
from tools.reproduce.entry import Finding
from tools.reproduce.recorded import BF16_LEVEL as BASE
from tools.reproduce.recorded import POST_CURVES as CURVES
from tools.reproduce.recorded import REPRODUCE, full_runs, newest_runs, without_lora
from tools.reproduce.rlhf_memory import STATES4, WEIGHTS4
from tools.reproduce.throughput import NO_TRIAL, together

LLAMA3 = "llama2-7b --seq-length 2048"  # preset and flags of LLaMA-7B's shape with the paper's length
MEMORY3, THROUGHPUT3 = -14.0, 27.0  # FP8-LM Table 3, LLaMA-7B: memory and throughput of FP8 relative to BF16, %
GAIN3 = "O3: fall of the held-out loss in training, over O0's fall"
LEVELS = ("O1", "O2", "O3")
PAPERS = LEVELS[-1]  # the level compared with the paper's figures
RATES = f"{REPRODUCE}/dpo_rates/tuning.csv"  # DPO at several learning rates
SAME_RUN = ("model", "dtype", "seq_length", "global_batch_size", "steps")  # of SFT or PPO at two levels, for a comparison
SAME_TREE = ("commit", "gpu")  # of one seed of DPO
HALF_WIDTH = "half width of the 95 % interval"

Runs = Mapping[str, Row]  # the runs of one level, by seed


def mean(
    quantity: str, of: Interval, where: Row, paper: float | None = None, unit: str = "%", seed: str | None = None
) -> Iterator[Finding]:
    """Yield the mean of a sample and, with several seeds, the half width of its interval.

    Args:
        quantity: name of the mean.
        of: the sample's mean and interval, in `unit`, or as a fraction if `unit` is "%".
        where: a row of the newest run.
        paper: the paper's value.
        unit: of all values.
        seed: of the only run; not shown with several.
    """
    scale = 100 if unit == "%" else 1
    yield Finding(quantity, scale * of.mean, paper, unit, seed=int(seed) if seed and of.half_width is None else None, where=where)
    if of.half_width is not None:
        yield Finding(f"{quantity}: {HALF_WIDTH}", scale * of.half_width, unit=unit, where=where)


def by_level(rows: Sequence[Row], runs: str, levels: Sequence[str] = ()) -> Mapping[str, Runs]:
    """Return level -> seed -> run; of several runs of a seed the last.

    Args:
        rows: runs of one setting.
        runs: what they are, for the message.
        levels: of each row; by default its recipe.

    Raises:
        ValueError: if O0 was not run with a seed of another level.
    """
    found: dict[str, dict[str, Row]] = {}
    for row, level in zip(rows, levels or [row["recipe"] for row in rows], strict=True):
        found.setdefault(level, {})[row["seed"]] = row
    for level, seed in ((level, seed) for level, seeds in found.items() for seed in seeds):
        if seed not in found.get(BASE, {}):
            raise ValueError(f"no {runs} of {BASE} with seed {seed}, with which {level} was run: run {BASE} with it too")
    return found


def same(levels: Mapping[str, Runs], keys: Sequence[str], which: str) -> None:
    """Compare columns of each level's runs with those of O0's runs of the same seeds.

    Args:
        levels: level -> seed -> run.
        keys: columns that must be equal; one that both runs lack is.
        which: what they are, for the message.

    Raises:
        ValueError: if a column differs.
    """
    for level, seed, row in ((level, seed, row) for level, runs in levels.items() for seed, row in runs.items()):
        base = levels[BASE][seed]
        if differ := [f"{key} {base.get(key)!r} and {row.get(key)!r}" for key in keys if base.get(key) != row.get(key)]:
            raise ValueError(f"the {which} of {BASE} and {level} with seed {seed} differ in {'; '.join(differ)}: run both levels with the "
                             "same options at one commit")  # fmt: skip


def courses(curves: Sequence[Row], run: str, quantity: str, runs: Sequence[Row]) -> Iterator[Finding]:
    """Yield the recorded curve of each run: of its level, commit and card.

    Args:
        curves: lines of all curves; without one of this kind, nothing is yielded.
        run: kind of training, such as "sft".
        quantity: such as "loss".
        runs: one of each level.

    Raises:
        ValueError: if a run has not one line per step.
    """
    lines = [line for line in curves if (line["run"], line["quantity"]) == (run, quantity)]
    name = "training loss" if quantity == "loss" else quantity
    for row in runs if lines else ():
        course = [line for line in lines if all(line[key] == row[key] for key in ("recipe", *SAME_TREE))]
        if len(course) != int(row["steps"]):
            raise ValueError(f"{CURVES} has {len(course)} values of {run}'s {quantity} of {row['recipe']} at {row['commit']}, whose "
                             f"run has {row['steps']} steps: keep the curve of one seed alone")  # fmt: skip
        for line in course:
            yield Finding(f"{line['recipe']}, {name}", float(line["value"]), x=float(line["step"]), where=line)


def _last(runs: Runs) -> tuple[str, Row]:
    """Return seed and row of the run that was recorded last."""
    return list(runs.items())[-1]


def relative(base: Runs, other: Runs, key: str) -> Interval:
    """Return the relative difference of a value from that of O0's runs of the same seeds."""
    return paired_difference(*({seed: float(row[key]) for seed, row in runs.items()} for runs in (base, other))).relative


def falls(runs: Runs) -> dict[str, float]:
    """Return by how much the held-out loss fell in training, by seed."""
    return {seed: float(row["valid_loss_before"]) - float(row["valid_loss_after"]) for seed, row in runs.items()}


def sft_findings(rows: Sequence[Row], curves: Sequence[Row] = ()) -> Iterator[Finding]:
    """FP8-LM, Table 3: loss, memory and throughput of each model relative to O0, the largest model unnamed, all weights trained; Figure 5,
    the training losses of that model's newest runs."""
    at_base = [row for row in without_lora(rows) if row["recipe"] == BASE]  # a large model may not fit
    compared = {row["model"]: int(row["parameters"]) for row in at_base}
    if not compared:
        raise ValueError("no fine-tuning result at O0, the baseline: examples/sft/run.sh runs all levels")
    largest = max(compared, key=compared.__getitem__)
    for model in compared:
        own = [row for row in full_runs(rows) if row["model"] == model]
        levels = by_level(own, f"fine-tuning result of {model} at {own[-1]['commit']}")
        same(levels, SAME_RUN, f"fine-tuning results of {model} at {own[-1]['commit']}")
        for level in (name for name in LEVELS if name in levels):
            name = level if model == largest else f"{level}, {model}"
            yield from _tuned_level(name, levels[BASE], levels[level])
        if model == largest:
            yield from courses(curves, "sft", "loss", [_last(runs)[1] for _, runs in sorted(levels.items())])


def _tuned_level(name: str, base: Runs, runs: Runs) -> Iterator[Finding]:
    """Compare a level's runs of supervised fine-tuning with O0's; `name`: of level and model."""
    ours, (seed, row) = name == PAPERS, _last(runs)  # the paper has one model, 7B
    one = int(seed) if len(runs) == 1 else None
    own, of_base = ([float(run["tokens_per_s"]) for run in level.values()] for level in (runs, {seed: base[seed] for seed in runs}))
    for ending, speed in (
        ("", statistics.median(own)),
        *(((": slowest run", min(own)), (": fastest run", max(own))) if one is None else ()),
    ):
        quantity, change = f"{name}: throughput from O0's at {row['commit']}{ending}", 100 * (speed / statistics.median(of_base) - 1)
        yield Finding(quantity, change, THROUGHPUT3 if ours and not ending else None, "%", seed=one, where=row)
    if row["peak_bytes"]:
        memory = 100 * relative(base, runs, "peak_bytes").mean
        yield Finding(f"{name}: peak memory from O0's", memory, MEMORY3 if ours else None, "%", seed=one, where=row)
    if row.get("loss_last"):
        yield from mean(f"{name}: training loss of the last step from O0's", relative(base, runs, "loss_last"), row, seed=seed)
    if row["valid_loss_after"]:
        yield from mean(f"{name}: held-out loss from O0's, each read in its own precision", relative(base, runs, "valid_loss_after"), row,
                        0.0 if ours else None, seed=seed)  # fmt: skip
    if row.get("valid_loss_before"):
        before = 100 * relative(base, runs, "valid_loss_before").mean
        yield Finding(f"{name}: held-out loss from O0's before any step", before, unit="%", seed=one, where=row)
        both = {BASE: falls({seed: base[seed] for seed in runs}), name: falls(runs)}
        for level in (BASE, name) if ours else (name,):
            fall = interval(list(both[level].values())).mean
            yield Finding(f"{level}: fall of the held-out loss in training", fall, unit="nats per token", seed=one, where=row)
        quotients = interval([fall / both[BASE][seed] for seed, fall in both[name].items()])
        gain = GAIN3 if ours else f"{name}: fall of the held-out loss in training, over O0's fall"
        yield from mean(gain, quotients, row, 1.0 if ours else None, "", seed)


def tuned(task: str) -> Iterator[Finding]:
    """FP8-LM, Tables 3 and 4: loss of SmolLM2 after SFT or DPO, relative to O0's of the same seeds: in the layers
    that were trained, and exported to BF16."""
    rows = {row["case"]: row for row in read(recorded.TUNING) if row["task"] == task and row["case"] not in ("start", BASE)}
    for (case, row), (measure, key) in itertools.product(rows.items(), {"its own layers": "own_loss", "BF16 layers": "bf16_loss"}.items()):
        level, _, flags = case.partition(" ")
        quantity = f"{task.upper()} by seed, {level}, rounded {flags.split()[1]}: loss from O0's, in {measure}"
        yield from mean(quantity, recorded.tuned(task, case, BASE, key), row)


def llama_steps() -> Iterator[Finding]:
    """FP8-LM, Table 3: speed and memory of training steps of LLaMA-7B's shape at each level relative to O0, from the newest recorded steps
    in which all levels were measured together; nothing without them."""
    rows = together(f"{LLAMA3} {NO_TRIAL}", 1, (BASE, *LEVELS))
    for level in (name for name in LEVELS if rows):
        name, row, ours = f"{level}, LLaMA-7B's shape, micro-batch 1", rows[level], level == PAPERS
        for quantity, key, paper in (("throughput", "tokens_s_gpu", THROUGHPUT3), ("peak memory", "peak_gib", MEMORY3)):
            change = 100 * (float(row[key]) / float(rows[BASE][key]) - 1)
            yield Finding(f"{name}: {quantity} from O0's", change, paper if ours else None, "%", where=row)


def dpo_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Report the loss of direct preference optimization at each level, with the same learning rate, data and seed."""
    for level, row in {row["recipe"]: row for row in rows}.items():
        seed = int(row["seed"])
        for key, quantity in (("loss_first", "loss of the first step"), ("loss_last", "loss of the last steps")):
            yield Finding(f"DPO, {level}: {quantity}", float(row[key]), seed=seed, where=row)
        yield Finding(f"DPO, {level}: chosen above rejected, last steps", 100 * float(row["accuracy_last"]), unit="%", seed=seed, where=row)


def dpo_rates(rows: Sequence[Row]) -> Iterator[Finding]:
    """Report the loss after DPO at each learning rate and level, in the layers that were trained and in BF16 layers, and its difference
    from O0's of the same rate and seeds. The losses are given seed by seed, since seeds ran at different commits.

    Before training the loss is ln 2 in any layers, so its fall is known. That of a level is divided by O0's, mean by mean, at a rate at
    which O0 learned: where the interval of its own fall excludes zero."""
    rates: dict[float, list[tuple[str, Row]]] = {}
    for row in rows:
        level, _, flags = row["case"].partition(" --lr ")
        if flags:
            rates.setdefault(float(flags), []).append((level, row))
    for rate, runs in sorted(rates.items()):
        levels = by_level([row for _, row in runs], f"DPO result at learning rate {rate:.0e}", [level for level, _ in runs])
        start = f"DPO at learning rate {rate:.0e}"
        same(levels, SAME_TREE, f"DPO results at learning rate {rate:.0e}")
        base, learned = levels[BASE], interval([math.log(2) - float(row["bf16_loss"]) for row in levels[BASE].values()])
        for level, seeds in sorted(levels.items()):
            name, (seed, row) = f"{start}, {level}", _last(seeds)
            one = int(seed) if len(seeds) == 1 else None
            for measure, key in (("its own layers", "own_loss"), ("BF16 layers", "bf16_loss")):
                for of_run, run in seeds.items():
                    yield Finding(f"{name}: loss in {measure}", float(run[key]), seed=int(of_run), where=run)
                if level != BASE:
                    yield from mean(f"{name}: loss from O0's, in {measure}", relative(base, seeds, key), row, seed=seed)
            if level == BASE:
                yield from mean(f"{name}: fall of the loss", learned, row, unit="", seed=seed)
            elif learned.half_width is None or learned.mean > learned.half_width:
                sums = [sum(math.log(2) - float(runs[seed]["bf16_loss"]) for seed in seeds) for runs in (base, seeds)]
                yield Finding(f"{name}: fall of the loss in BF16 layers, over O0's fall", sums[1] / sums[0], seed=one, where=row)


def ppo_speeds(rows: Sequence[Row]) -> Iterator[Finding]:
    """Report the time of a PPO step and the speed of its rollouts, from runs that had the GPU to themselves."""
    for level, row in {row["recipe"]: row for row in rows if row.get("s_per_step")}.items():
        seed = int(row["seed"])
        yield Finding(f"PPO, {level}: time of a step", float(row["s_per_step"]), unit="s", seed=seed, where=row)
        yield Finding(f"PPO, {level}: tokens per second of the rollouts", float(row["rollout_tokens_per_s"]), seed=seed, where=row)


def ppo_runs(rows: Sequence[Row]) -> dict[str, Mapping[str, Runs]]:
    """Return the newest PPO runs of each reward at O0 and O3: reward -> level -> seed -> run.

    Raises:
        ValueError: if a level is missing, or the two differ in their options or seeds.
    """
    rewards: dict[str, list[Row]] = {}
    for row in newest_runs(rows, "reward"):
        rewards.setdefault(row["reward"], []).append(row)
    found: dict[str, Mapping[str, Runs]] = {}
    for reward, runs in rewards.items():
        which = f"PPO results with reward `{reward}` at {runs[-1]['commit']}"
        covered = {row["recipe"] for row in runs}
        if not {BASE, PAPERS} <= covered:
            raise ValueError(f"the {which} cover {', '.join(sorted(covered))}: run examples/rlhf/run.sh, which runs O0 and O3")
        levels = by_level(runs, f"PPO result with reward `{reward}` at {runs[-1]['commit']}")
        if lacking := levels[BASE].keys() - levels[PAPERS].keys():
            raise ValueError(f"the {which} have seed {min(lacking)} at O0 and not at O3: run O3 with it too")
        same(levels, SAME_RUN, which)
        found[reward] = {level: levels[level] for level in (BASE, PAPERS)}
    return found


def ppo_findings(rows: Sequence[Row], curves: Sequence[Row] = ()) -> Iterator[Finding]:
    """FP8-LM, Table 4: memory of weights and states relative to O0, in the newest runs of both levels; the paper counts the gradient as a
    state. Figure 6: the rewards, as curves of the newest runs only, one seed at each level, and with other rewards as numbers."""
    if not rows:
        raise ValueError("no PPO result: run examples/rlhf/run.sh, which runs O0 and O3")
    runs = ppo_runs(rows)
    levels = runs[rows[-1]["reward"]]
    base, (seed, row) = levels[BASE], _last(levels[PAPERS])
    one = int(seed) if len(base) == 1 else None
    sums = [_with_sums(levels[level]) for level in (BASE, PAPERS)]
    weights = 100 * relative(base, levels[PAPERS], "weight_mib").mean
    yield Finding("O3: weights of all models from O0's", weights, WEIGHTS4, "%", seed=one, where=row)
    yield Finding("O3: states and gradients from O0's", 100 * relative(sums[0], sums[1], "sum").mean, STATES4, "%", seed=one, where=row)
    yield Finding("O3: states from O0's", 100 * relative(base, levels[PAPERS], "state_mib").mean, unit="%", seed=one, where=row)
    for reward, of_reward in runs.items():
        yield from _rewards(reward, of_reward)
    yield from courses(curves, "ppo", "reward", [base[seed], row])


def _with_sums(runs: Runs) -> Runs:
    """Return the runs with the sum of states and gradients, which the paper counts together."""
    return {seed: dict(run) | {"sum": str(float(run["state_mib"]) + float(run["gradient_mib"]))} for seed, run in runs.items()}


def _rewards(reward: str, levels: Mapping[str, Runs]) -> Iterator[Finding]:
    """Yield rewards and distance from the reference model at O0 and O3, and with several seeds how far O3's last rewards are above O0's."""
    for level, runs in levels.items():
        seed, row = _last(runs)
        for key, quantity, unit in (
            ("reward_first", f"reward `{reward}` of the first 10 steps", ""),
            ("reward_last", f"reward `{reward}` of the last 10 steps", ""),
            ("kl_last", f"KL from the reference in the last step, reward `{reward}`", "nats per answer"),
        ):
            yield from mean(f"{level}: {quantity}", interval([float(run[key]) for run in runs.values()]), row, unit=unit, seed=seed)
    base, fp8 = levels[BASE], levels[PAPERS]
    if len(base) > 1:
        for key, quantity in (("reward_first", "first"), ("reward_last", "last")):
            above = interval([float(fp8[seed][key]) - float(base[seed][key]) for seed in base])
            name = f"{PAPERS}: reward `{reward}` of the {quantity} 10 steps, less O0's"
            yield from mean(name, above, _last(fp8)[1], unit="")
