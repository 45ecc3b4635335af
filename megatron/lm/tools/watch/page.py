"""Write the view of runs as one HTML file that the browser reloads: curves as SVG, and the underflow of every layer.

All runs are in one chart per quantity, so they have one scale. The file needs no network and no script.
"""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.lm.shell.durable import written_aside
from megatron.lm.tools.inspect_scales import NARROW, spoken
from megatron.lm.tools.report import COLORS, STYLE
from megatron.lm.tools.watch.run_files import WatchedRun
from megatron.lm.tools.watch.screen import TENSORS, percent, without_record
from megatron.lm.tools.watch.status import Status

WIDTH, HEIGHT = 680, 260
LEFT, RIGHT, TOP, BOTTOM = 88, 40, 12, 44  # margins of a chart
POINTS = 600  # of a curve, at most
FAINT, FULL = 1e-6, 1e-1  # shares of underflow at which a cell is white, and is darkest; logarithmic between them
Points = Sequence[tuple[float, float]]

MORE = """
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; } .status { font-weight: 600; }
.key { display: inline-block; width: .9rem; height: .9rem; border-radius: 3px; vertical-align: -2px; margin-right: .4rem; }
.tight td, .tight th { padding: .15rem .6rem; font-size: .85rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
/* On a phone a chart is half as wide: its letters, which shrink with it, are larger there, and all columns of a table fit. */
@media (max-width: 46em) { svg { font-size: 20px; } .tight td, .tight th { padding: .15rem .25rem; font-size: .7rem; } }
"""


def write_page(path: Path, runs: Sequence[WatchedRun], statuses: Sequence[Status], written: str, seconds: int | None) -> None:
    """Write the page to `path`, complete or not at all.

    Args:
        written: the time of day, to show.
        seconds: after which the browser reloads it; None: never.

    Raises:
        OSError: it cannot be written.
    """
    with written_aside(path) as stream:
        stream.write(page(runs, statuses, written, seconds).encode())


def page(runs: Sequence[WatchedRun], statuses: Sequence[Status], written: str, seconds: int | None) -> str:
    """Return the page, with the arguments of `write_page`."""
    refresh = f'<meta http-equiv="refresh" content="{seconds}">\n' if seconds is not None else ""
    reload = f"reloads every {seconds} s" if seconds is not None else "does not reload any more"
    parts = ["<h1>Training, live</h1>", f'<p class="note">Written at {html.escape(written)}; the page {reload}.</p>']
    for run, status, color in zip(runs, statuses, _colors(runs), strict=True):
        recipe = html.escape(str((run.start or {}).get("recipe") or ""))
        key = f'<span class="key" style="background:{color}"></span>'
        parts.append(f'<p>{key}<b>{html.escape(run.name)}</b> {recipe} <span class="status">{html.escape(status.text)}</span></p>')
    for title, key, unit, factor in (("Loss", "loss", "nats per token", 1.0), ("Speed", "tokens_per_s", "thousand tokens/s", 1e-3)):
        curves = {run.name: _points(run, key, factor) for run in runs}
        if any(curves.values()):
            parts.append(f"<h2>{title}</h2>\n{chart(curves, _colors(runs), 'iteration', unit)}")
    for run in runs:
        parts += _layers(run)
        parts += [f'<p class="note">{html.escape(run.name)}, {html.escape(event)}</p>' for event in run.events]
        if run.unreadable:
            left_out = f"{run.unreadable} lines of {run.metrics.name} could not be read and are left out"
            parts.append(f'<p class="note">{html.escape(left_out)}</p>')
    head = f'<meta charset="utf-8">\n{NARROW}\n{refresh}<title>Training, live</title>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n<style>{STYLE}{MORE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _colors(runs: Sequence[WatchedRun]) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(runs))]


def _points(run: WatchedRun, key: str, factor: float) -> list[tuple[float, float]]:
    points = [(line["iteration"], factor * line[key]) for line in run.train if line.get(key) is not None and math.isfinite(line[key])]
    return points[:: max(1, math.ceil(len(points) / POINTS))]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    least = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= least)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def chart(curves: Mapping[str, Points], colors: Sequence[str], across: str, up: str) -> str:
    """Return an SVG of curves with axes, ticks and units; one of the curves must have a point."""
    xs, ys = ([point[axis] for points in curves.values() for point in points] for axis in (0, 1))
    (left, right), (low, high) = (min(xs), max(xs)), (min(ys), max(ys))
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - room, high + room

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(up)} by {html.escape(across)}">']
    for value in ticks(low, high, 7):
        _, y = place(left, value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#4b5563">{value:.4g}</text>')
    for value in ticks(left, right, 7):
        x, _ = place(value, low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" fill="#4b5563">{value:,.10g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(across)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="17" y="{middle}" text-anchor="middle" transform="rotate(-90 17 {middle})">{html.escape(up)}</text>')
    for points, color in zip(curves.values(), colors, strict=True):
        drawn = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        if len(points) == 1:
            x, y = place(*points[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
        elif points:
            parts.append(f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="1.8"/>')
    return "\n".join([*parts, "</svg>"])


def _layers(run: WatchedRun) -> list[str]:
    title = f"<h2>Underflow by layer: {html.escape(run.name)}</h2>"
    layers = run.underflow()
    if not layers:
        return [title, f'<p class="note">{html.escape(without_record(run))}</p>'] if run.train else []
    assert run.step is not None
    note = f"Iteration {run.step['iteration']}; % of non-zero values that became zero. Colors are logarithmic, from 0.0001 % to 10 %."
    head = "".join(f"<th>{cell}</th>" for cell in ("layer", *TENSORS))
    rows = "\n".join(f"<tr><td>{html.escape(spoken(layer))}</td>{_cells(shares)}</tr>" for layer, shares in layers.items())
    return [title, f'<p class="note">{note}</p>', f'<div class="wide"><table class="tight"><tr>{head}</tr>\n{rows}</table></div>']


def _cells(shares: Mapping[str, float]) -> str:
    cells = []
    for tensor in TENSORS:
        share = shares.get(tensor)
        level = 0.0 if not share else min(1.0, max(0.0, math.log(share / FAINT) / math.log(FULL / FAINT)))
        cells.append(f'<td style="background:rgba(234,88,12,{level:.2f})">{html.escape(percent(share))}</td>')
    return "".join(cells)
