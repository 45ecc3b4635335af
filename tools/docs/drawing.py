"""Draw the published figures from their numbers, at the width of a page of the documentation.

Every axis has a label with its unit, and panels that are compared have one scale. `DRAWING` changes with this file: `make tables` draws a
figure again if its numbers or this file have changed since.
"""

import hashlib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS, THEIRS = "#2a6fb0", "#9a9a9a"
Numbers = dict[str, Any]
WIDTH = 5.0  # inches; letters of 9 to 10 points are then readable on a phone
STYLES = ((2.6, "solid"), (1.4, "solid"), (1.4, "dashed"), (1.2, "dotted"), (1.2, "dashdot"))  # so that curves that coincide are all seen
STATES = {"weight": "#1e3a8a", "gradient": "#2563eb", "master": "#60a5fa", "m": "#f59e0b", "v": "#fcd34d"}
LONG_LABEL = 17  # characters next to a bar
LINE = 48  # characters of a bold title
LONG_NAME = 30  # characters of a curve's name, two of which do not fit next to each other
DRAWING = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def axes_of(rows: int, height: float, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its axes, [rows] or [rows, columns]; `options` are passed to `subplots`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(WIDTH, height), dpi=180, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=9)
        one.xaxis.label.set_size(10)
        one.yaxis.label.set_size(10)
    return figure, axes[:, 0] if columns == 1 else axes


def draw_bars(numbers: Numbers, path: Path) -> None:
    """Draw a row of speed and memory for each model; ours are blue."""
    heights = [0.8 + 0.4 * len(one["names"]) for one in numbers.values()]
    figure, axes = axes_of(len(numbers), sum(heights) + 0.5, 2, height_ratios=heights, sharey="row")
    for row, (model, one) in zip(axes, numbers.items(), strict=True):
        colors = [OURS if name.startswith("O") else THEIRS for name in one["names"]]
        for axis, values, label, text in (
            (row[0], [value / 1000 for value in one["tokens_s"]], "thousand tokens/s\nper GPU", "{:.1f}"),
            (row[1], one["peak_gib"], "peak memory, GiB", "{:.0f}"),
        ):
            bars = axis.barh(range(len(values)), values, color=colors)
            axis.bar_label(bars, [text.format(value) for value in values], padding=3, fontsize=9)
            axis.set(xlabel=label, xlim=(0, 1.25 * max(values)))
        row[0].invert_yaxis()
        row[0].set_yticks(range(len(one["names"])), [in_lines(name) for name in one["names"]], fontsize=9)
        row[0].set_title(textwrap.fill(model, LINE), loc="left", fontsize=10, fontweight="bold", x=-1.15)
    figure.savefig(path)


def draw_ranges(numbers: Numbers, path: Path) -> None:
    """Draw a loss and the range of its seeds for each precision, and a line at BF16's."""
    names = numbers["names"]
    figure, (axes,) = axes_of(1, 0.9 + 0.3 * len(names))
    below = [loss - least for loss, least in zip(numbers["loss"], numbers["least"], strict=True)]
    above = [most - loss for loss, most in zip(numbers["loss"], numbers["most"], strict=True)]
    axes.errorbar(numbers["loss"], range(len(names)), xerr=[below, above], fmt="o", color=OURS, ecolor=THEIRS, capsize=4)
    axes.axvline(numbers["loss"][names.index("bf16")], color=THEIRS, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="validation loss, nats per token\nbars: range of the seeds; line: bf16", ylabel="precision")
    figure.savefig(path)


def draw_lines(numbers: Numbers, path: Path) -> None:
    """Draw the SNR of the averaged gradient over the number of ranks."""
    figure, (axes,) = axes_of(1, 3.6)
    for (name, values), (width, style) in zip(numbers["snr_db"].items(), cycle(len(numbers["snr_db"])), strict=True):
        axes.plot(numbers["ranks"], values, marker="o", markersize=4, label=name, linewidth=width, linestyle=style)
    axes.set(xlabel="data-parallel ranks", ylabel="SNR of the average, dB", xscale="log", xticks=numbers["ranks"])
    axes.set_xticks(numbers["ranks"], [str(count) for count in numbers["ranks"]], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=9, frameon=False)
    figure.savefig(path)


def draw_curves(numbers: Numbers, path: Path) -> None:
    """Draw the validation loss relative to BF16's over the tokens: mean and range of the seeds."""
    figure, (axes,) = axes_of(1, 3.8)
    tokens = [count / 1e6 for count in numbers["tokens"]]
    for name, triples in numbers["against_bf16"].items():
        means, least, most = ([100 * triple[place] for triple in triples] for place in range(3))
        (line,) = axes.plot(tokens, means, marker="o", markersize=4, label=name)
        axes.fill_between(tokens, least, most, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.axhline(0, color=THEIRS, linewidth=0.8)
    axes.set(xlabel="million tokens", ylabel="validation loss, % from BF16\nmean and range of three seeds")
    axes.legend(ncols=3, fontsize=9, frameon=False)
    figure.savefig(path)


def draw_panels(numbers: Numbers, path: Path) -> None:
    """Draw the curves of a reproduced table or figure, in panels with one scale.

    numbers: `panels` (title -> curve's name -> x and y), `x` and `y` (labels), `log` (axes with a logarithmic scale: "", "x", "y" or "xy").
    """
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = numbers["panels"]
    several = len(panels) > 1
    figure, all_axes = axes_of(len(panels), 3.8 if not several else 2.6 * len(panels), sharey=True)
    for axes, (title, drawn) in zip(all_axes, panels.items(), strict=True):
        for (name, (xs, ys)), (width, style) in zip(drawn.items(), cycle(len(drawn)), strict=True):
            axes.plot(xs, ys, label=name, linewidth=width, linestyle=style)
        axes.set(xlabel=numbers["x"], ylabel=numbers["y"])
        if several:
            axes.set_title(title, loc="left", fontsize=9)
        if len(drawn) > 1:
            columns = 2 if max(map(len, drawn)) < LONG_NAME else 1
            axes.legend(frameon=False, fontsize=9, **({} if several else {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": columns}))
        axes.xaxis.get_major_locator().set_params(integer=True)
        if max(x for xs, _ in drawn.values() for x in xs) >= 1e6:
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x else "0")
        if "x" in numbers["log"]:
            axes.set(xscale="log")
            places = sorted({x for xs, _ in drawn.values() for x in xs})
            axes.set_xticks(places, [f"{x:g}" for x in places])
            axes.minorticks_off()
        if "y" in numbers["log"]:
            axes.set(yscale="log")
    if several:  # the first tenth of a training run would take most of a low panel
        late = [y for drawn in panels.values() for xs, ys in drawn.values() for x, y in zip(xs, ys, strict=True) if x > xs[-1] / 10]
        margin = (max(late) - min(late)) / 20
        all_axes[0].set(ylim=(min(late) - margin, max(late) + margin))
    figure.savefig(path)


def draw_scaling(numbers: Numbers, path: Path) -> None:
    """Draw the time and memory of a step over the number of GPUs, a row for each model.

    numbers: model -> precision -> `gpus`, `ms` and `gib`.
    """
    figure, axes = axes_of(len(numbers), 2.1 * len(numbers), 2, sharex=True)
    counts = sorted({count for lines in numbers.values() for values in lines.values() for count in values["gpus"]})
    for row, (model, lines) in zip(axes, numbers.items(), strict=True):
        for color, (precision, values) in zip((THEIRS, OURS), lines.items(), strict=True):
            row[0].plot(values["gpus"], [ms / 1e3 for ms in values["ms"]], marker="o", markersize=4, color=color, label=precision)
            row[1].plot(values["gpus"], values["gib"], marker="o", markersize=4, color=color, label=precision)
        row[0].set(xscale="log", yscale="log", ylim=(0.01, 100), ylabel="seconds per step")
        row[1].set(xscale="log", ylim=(0, 80), ylabel="GiB, fullest process")
        row[0].set_title(textwrap.fill(model, LINE), loc="left", fontsize=9, fontweight="bold")
        for axis in row:
            axis.set_xticks(counts, ["" if index % 2 else str(count) for index, count in enumerate(counts)])
            axis.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("GPUs")
    axes[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(path)


def draw_bytes(numbers: Numbers, path: Path) -> None:
    """Draw the bytes per parameter of each precision, stacked by state; all but the chosen one are faint.

    numbers: `chosen`, a precision, and `bytes`: precision -> state -> bytes per parameter.
    """
    figure, (axes,) = axes_of(1, 3.4)
    names, left = list(numbers["bytes"]), [0.0] * len(numbers["bytes"])
    for state, color in STATES.items():
        sizes = [numbers["bytes"][name][state] for name in names]
        bars = axes.barh(names, sizes, left=left, color=color, label=state, height=0.7)
        for name, bar in zip(names, bars, strict=True):
            bar.set_alpha(1.0 if name == numbers["chosen"] else 0.3)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for name, total, label in zip(names, left, axes.get_yticklabels(), strict=True):
        weight = "bold" if name == numbers["chosen"] else "normal"
        axes.text(total + 0.2, name, f"{total:.4g}", va="center", fontsize=9, fontweight=weight)
        label.set_fontweight(weight)
    axes.set(xlabel="bytes per parameter of a linear weight", ylabel="precision", xlim=(0, 1.1 * max(left)))
    axes.invert_yaxis()
    legend = axes.legend(
        frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(STATES), columnspacing=1, handlelength=1.2
    )
    for handle in legend.legend_handles:
        handle.set_alpha(1.0)
    figure.savefig(path)


def in_lines(name: str) -> str:
    """Return a long name in two lines, the second saying how it ran; a name without that part stays on one line."""
    first, _, last = name.rpartition(", ")
    return f"{first},\n{last}" if first and len(name) > LONG_LABEL else name


def cycle(count: int) -> list[tuple[float, str]]:
    """Return width and style of `count` curves."""
    return [STYLES[i % len(STYLES)] for i in range(count)]
