"""Reproduce Collage's Table 6, Figures 2 and 3 (the share of updates that arrives), Table 5 right, and Table 7 (speed).

Options have the paper's names: A is BF16 only, light and plus use multi-component floats, D has FP32 states and master weights. Tables
1 and 2 are in exact.py, 3 and 4 in post.py, 8 in grids.py; Table 5 and Figure 4 are queries of findings.toml.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.lm.tools.inspect_scales import read as read_steps
from megatron.lm.tools.report import Run
from tools.measurements import ROOT
from tools.reproduce import queries
from tools.reproduce.coat_flow import Flow, Llama
from tools.reproduce.entry import WHOLE, Finding, Task, paper, training
from tools.reproduce.fp16_lstm import bytes_of
from tools.reproduce.trainings import ENWIK8, Loop, collage, trained

TABLE6, DOUBLED6 = (
    {variant: {float(beta2): value for beta2, value in row.items()} for variant, row in paper(f"collage.{name}").items()}
    for name in ("table6", "table6-doubled")
)
TWICE = ", twice the batch"  # suffix of a piece: the batch of the paper's second half, in half the steps
LOOPS = {
    "toy": Loop(width=32, layers=1, length=16, batch=8, steps=20),
    "small": Loop(width=64, layers=2, length=32, batch=16, steps=400),
}
NAMES = {"a": "bf16-a", "light": "collage-light", "plus": "collage-plus", "d": "bf16-d"}
COURSE6 = {"d": "bf16-d", "plus": "collage-plus", "light": "collage-light", "a": "bf16-a", "d-mw": "bf16-dmw"}  # GPT-125M, Table 6
# GPT-125M, one epoch of enwik8. Its runs take batch and steps from here, and the rest from the preset, which agrees.
FULL6 = Loop(width=768, layers=12, length=2048, batch=4, steps=2000)
AT_ONCE, RECORDS = 3, 10  # concurrent training runs, and recorded steps
KEPT_BETA2 = 0.95  # beta2 of the comparison of all precisions


def table6(task: Task) -> Iterator[Finding]:
    """Report all options at one beta2: perplexity over D's; for our own runs, also lost arithmetic and the share of the update that
    arrives."""
    if task.size == "full":
        yield from _table6_at_125m(task)
        return
    beta2, loop, papers = setting6(task.piece, LOOPS[task.size])
    text = bytes_of(task.text)
    last = {variant: list(collage(variant, beta2, loop, text, seed=1234))[-1] for variant in ("d", "plus", "light", "a")}
    for variant, row in last.items():
        prefix = f"{variant}, {task.piece}: "
        if variant != "d":
            ratio = papers[variant][beta2] / papers["d"][beta2]
            ours = math.exp(row["valid_loss"] - last["d"]["valid_loss"])
            yield Finding(prefix + "validation perplexity over D's", ours, ratio, seed=1234)
        yield Finding(prefix + "lost arithmetic, last step", 100 * row["lost"], unit="%", seed=1234)
        yield Finding(prefix + "EDQ over the norm of the update", row["edq"] / row["update_norm"], seed=1234)


def setting6(piece: str, loop: Loop) -> tuple[float, Loop, Mapping[str, Mapping[float, float]]]:
    """Return the beta2 of a piece of Table 6, its loop (as many tokens with either batch), and the paper's half of the table."""
    beta2 = float(piece.removesuffix(TWICE).removeprefix("beta2 "))
    if piece.endswith(TWICE):
        return beta2, replace(loop, batch=2 * loop.batch, steps=loop.steps // 2), DOUBLED6
    return beta2, loop, TABLE6


def _table6_at_125m(task: Task) -> Iterator[Finding]:
    """Yield perplexity over D's; lost arithmetic and the share of the update that arrives, means over the recorded steps."""
    beta2, loop, papers = setting6(task.piece, FULL6)
    if task.piece == f"beta2 {KEPT_BETA2}":
        yield from queries.findings("options_small_beta2")
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = dict(zip(COURSE6, pool.map(lambda name: _recorded(name, beta2, loop, task.folder), COURSE6.values()), strict=True))
    for variant, (run, steps) in runs.items():
        prefix = f"{variant}, {task.piece}: "
        if variant != "d":
            theirs = papers[variant][beta2] / papers["d"][beta2] if variant in papers else None
            ours = math.exp(run.valid[-1]["loss"] - runs["d"][0].valid[-1]["loss"])
            yield Finding(prefix + "validation perplexity over D's", ours, theirs, seed=1234)
        totals = [step["total"] for step in steps if step["total"] is not None]
        yield Finding(prefix + "lost arithmetic, mean", 100 * _mean(total["lost"] for total in totals), unit="%", seed=1234)
        yield Finding(
            prefix + "share of the update that arrives, mean", 100 * _mean(total["arrived"] for total in totals), unit="%", seed=1234
        )
        for line in run.train:
            yield Finding(f"{variant}, {task.piece}, training loss", line["loss"], x=line["iteration"], seed=1234)


def _recorded(precision: str, beta2: float, loop: Loop, folder: Path) -> tuple[Run, list[dict[str, Any]]]:
    """Train GPT-125M with the loop's batch and steps, and return the run and the steps of its precision record."""
    folder = folder / f"batch{loop.batch}"
    record = folder / f"{precision}_{beta2}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    flags = f"--micro-batch-size {loop.batch} --global-batch-size {loop.batch}"
    flags += f" --record-precision {record} --record-interval {loop.steps // RECORDS}"
    run = trained(f"{precision} --adam-beta2 {beta2}", 1234, loop.steps, flags, ROOT / ENWIK8, folder)
    return run, read_steps(record)


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def figures(task: Task) -> Iterator[Finding]:
    """Report the course of one option at beta2 0.999: EDQ, lost arithmetic, norms of weights and update."""
    variant = task.piece.removeprefix("option ")
    course = list(collage(variant, 0.999, LOOPS[task.size], bytes_of(task.text), seed=1234))
    for row in course:
        yield Finding(f"{variant}, EDQ", row["edq"], x=row["step"], seed=1234)
    for quantity, key, scale, unit in (
        ("EDQ, mean", "edq", 1.0, ""),
        ("lost arithmetic, mean", "lost", 100.0, "%"),
        ("norm of the update, mean", "update_norm", 1.0, ""),
        ("norm of the weights, mean", "norm", 1.0, ""),
    ):
        yield Finding(f"{variant}, {quantity}", scale * sum(row[key] for row in course) / len(course), unit=unit, seed=1234)
    ratio = course[-1]["norm"] / course[-1]["update_norm"]
    yield Finding(f"{variant}, norm of the weights over that of the update", ratio, 900.0 if variant == "a" else None, seed=1234)


def perplexities(task: Task) -> Iterator[Finding]:
    """Figure 3, middle: the course of the training loss of one option at beta2 0.999, and its validation loss, of one seed."""
    variant, _, seed = task.piece.partition(", seed ")
    course = list(collage(variant, 0.999, LOOPS[task.size], bytes_of(task.text), int(seed)))
    yield from training(variant, ((row["step"], row["loss"]) for row in course), course[-1]["valid_loss"], int(seed))


def llama(task: Task) -> Iterator[Finding]:
    """Table 5, right, on a small Llama: perplexity over D's of the options at one beta2 and seed, their losses, and the largest rise of the
    training loss between two records, which an exploding gradient would cause."""
    beta2, seed = (float(number) for number in task.piece.removeprefix("beta2 ").split(", seed "))
    text, papers = bytes_of(task.text), paper("collage.table5-right")[f"{beta2:g}"]
    last: dict[str, float] = {}
    for variant in ("d", "plus", "light", "a"):
        course = list(collage(variant, beta2, LOOPS[task.size], text, int(seed), build=lambda loop: Llama(loop, Flow())))
        last[variant] = course[-1]["valid_loss"]
        prefix = f"{variant}, beta2 {beta2}: "
        yield Finding(prefix + "validation loss", last[variant], unit="nats per byte", seed=int(seed))
        if variant != "d":
            ratio = papers[variant] / papers["d"]
            yield Finding(prefix + "validation perplexity over D's", math.exp(last[variant] - last["d"]), ratio, seed=int(seed))
        rise = max(later["loss"] - row["loss"] for row, later in itertools.pairwise(course))
        yield Finding(prefix + "largest rise of the training loss in ten steps", rise, unit="nats per byte", seed=int(seed))


def table7(task: Task) -> Iterator[Finding]:
    """Report speed over option D's on one GPU: the paper's models from recorded steps; 125M from its runs."""
    return queries.findings("speeds_125m" if task.piece == WHOLE else "speeds_7", piece=task.piece)
