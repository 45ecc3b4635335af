"""Show runs on a terminal: for each its status, loss, speed and the layers with the most underflow, with a line of blocks as its curve.

The curves of several runs share one scale, and the worst layers are taken from the last recorded step.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from megatron.lm.run.reports.log_line import short
from megatron.lm.shell.terminal import Part
from megatron.lm.tools.inspect_scales import spoken
from megatron.lm.tools.watch.run_files import WatchedRun
from megatron.lm.tools.watch.status import STYLES, Status

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
WIDTH = 40  # of a curve
LAYERS = 8  # per run, the worst
TENSORS = ("input", "weight", "grad_output", "grad")
Line = list[Part]


def curve(values: Sequence[float | None], low: float, high: float, blocks: str = BLOCKS) -> str:
    """Return at most `WIDTH` blocks, each the mean of its share of the values; `!` for a share with one that is not finite."""
    count = min(WIDTH, len(values))
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    return "".join(_block(share, low, high, blocks) for share in shares)


def _block(share: Sequence[float | None], low: float, high: float, blocks: str) -> str:
    numbers = [value for value in share if value is not None and math.isfinite(value)]
    if len(numbers) < len(share):
        return "!"
    level = (statistics.fmean(numbers) - low) / (high - low) if high > low else 0.0
    return blocks[min(len(blocks) - 1, int(level * len(blocks)))]


def bounds(runs: Iterable[WatchedRun], key: str) -> tuple[float, float]:
    """Return the least and the largest number of all runs under `key`, their common scale; (0, 0) without any."""
    values = [line[key] for run in runs for line in run.train if line.get(key) is not None and math.isfinite(line[key])]
    return (min(values), max(values)) if values else (0.0, 0.0)


def screen(runs: Sequence[WatchedRun], statuses: Sequence[Status], blocks: str = BLOCKS) -> list[Line]:
    """Return the lines about all runs."""
    scales = {key: bounds(runs, key) for key in ("loss", "tokens_per_s")}
    lines: list[Line] = []
    for run, status in zip(runs, statuses, strict=True):
        lines.append([Part(run.name, "bold"), *_recipe(run), Part(status.text, STYLES[status.word])])
        lines += [[Part("  " + text)] for text in _numbers(run, scales, blocks)]
        lines += [[Part("  " + text)] for text in _underflow(run)]
        lines += [[Part(f"  {event}", "yellow")] for event in run.events]
        if run.unreadable:
            lines.append([Part(f"  {run.unreadable} lines of {run.metrics.name} could not be read and are left out", "yellow")])
        lines.append([Part("")])
    if len(runs) > 1:
        lines.append([Part("Curves of one kind share a scale: the least and the largest value of all runs shown.", "dim")])
    return lines


def _recipe(run: WatchedRun) -> list[Part]:
    name = (run.start or {}).get("recipe")
    return [Part(str(name))] if name else []


def _numbers(run: WatchedRun, scales: dict[str, tuple[float, float]], blocks: str) -> Iterable[str]:
    if not run.train:
        return
    first, last = run.train[0], run.train[-1]
    losses = [line["loss"] for line in run.train]
    yield f"loss      {_loss(last['loss']):>8}  {curve(losses, *scales['loss'], blocks)}  nats per token, from {_loss(first['loss'])}"
    speeds = [line["tokens_per_s"] for line in run.train if line.get("tokens_per_s") is not None]
    if speeds:
        drawn = curve(speeds, *scales["tokens_per_s"], blocks)
        yield f"tokens/s  {short(speeds[-1]):>8}  {drawn}  all processes, median {short(statistics.median(speeds))}"
    if run.valid:
        bits = run.valid[-1].get("bits_per_byte")
        per_byte = f", {bits:.4f} bits per byte" if bits is not None else ""
        yield f"valid     {_loss(run.valid[-1]['loss']):>8}  at iteration {run.valid[-1]['iteration']}{per_byte}"
    parts = [("lr {:.2e}", "lr"), ("gradient norm {:.3g}", "grad_norm"), ("{:.2f} GiB", "memory_gib"), ("{:.0f} skipped", "skipped")]
    yield ", ".join(text.format(last[key]) for text, key in parts if last.get(key) is not None)


def _loss(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _underflow(run: WatchedRun) -> Iterable[str]:
    layers = run.underflow()
    if not layers:
        yield without_record(run)
        return
    worst = sorted(layers, key=lambda layer: -max(layers[layer].get(tensor, 0.0) for tensor in TENSORS))[:LAYERS]
    assert run.step is not None
    shown = f"{len(worst)} worst of {len(layers)} layers"
    yield f"underflow at iteration {run.step['iteration']}, % of non-zero values that became zero; {shown}"
    width = max(len(spoken(layer)) for layer in worst)
    yield f"  {'':<{width}}  {'  '.join(f'{tensor:>11}' for tensor in TENSORS)}"
    for layer in worst:
        cells = (f"{percent(layers[layer].get(tensor)):>11}" for tensor in TENSORS)
        yield f"  {spoken(layer):<{width}}  {'  '.join(cells)}"


def percent(share: float | None) -> str:
    """Return a share as a percentage; "-" if it was not recorded."""
    return "-" if share is None else "0" if share == 0 else f"{100 * share:.3f}" if share >= 5e-6 else "<0.001"


def without_record(run: WatchedRun) -> str:
    """Return why no underflow per layer is shown."""
    if run.unclear is not None:
        return f"underflow by layer: {run.unclear}"
    if run.record is not None:
        return "underflow by layer: the precision record has no step yet"
    whole = run.train[-1].get("grad_underflow") if run.train else None
    of_all = f" (of all gradients: {percent(whole)} %)" if whole is not None else ""
    return f"underflow by layer: not recorded; --record-precision FILE in the folder of the metrics file records it{of_all}"
