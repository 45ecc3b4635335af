"""Draw the published figures from their numbers, at the width of a page of the documentation.

A picture contains a hash of its numbers and of this file. `make tables` draws it again if either has changed since, and a check compares
this hash, so that another version of matplotlib changes nothing.
"""

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS, THEIRS = "#2a6fb0", "#9a9a9a"
Numbers = dict[str, Any]
WIDTH = 5.0  # inches; letters of 9 to 10 points are then readable on a phone
STYLES = ((2.6, "solid"), (1.4, "solid"), (1.4, "dashed"), (1.2, "dotted"), (1.2, "dashdot"))  # so that curves that coincide are all seen
LONG_LABEL = 17  # characters next to a bar
LINE = 48  # characters of a bold title
LONG_NAME = 30  # characters of a curve's name, two of which do not fit next to each other


def digest(numbers: Numbers) -> str:
    """Return the hash of a figure's numbers and of what draws it."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode() + Path(__file__).read_bytes()).hexdigest()


def is_current(numbers: Numbers, path: Path) -> bool:
    """Return whether a picture was drawn from these numbers by this file."""
    return path.is_file() and digest(numbers).encode() in path.read_bytes()


def draw(numbers: Numbers, path: Path) -> None:
    """Draw a figure: bars if its numbers have models, else curves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = "models" in numbers
    rows = len(numbers["models" if bars else "panels"])
    heights = [0.8 + 0.4 * len(one["names"]) for one in numbers["models"].values()] if bars else [3.8 if rows == 1 else 2.6] * rows
    figure = Figure(figsize=(WIDTH, sum(heights) + (0.5 if bars else 0)), dpi=180, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2 if bars else 1, squeeze=False, height_ratios=heights, sharey="row" if bars else True)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=9)
        one.xaxis.label.set_size(10)
        one.yaxis.label.set_size(10)
    if bars:
        _bars(axes, numbers["models"])
    else:
        _curves(axes[:, 0], numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Description": digest(numbers)})


def _bars(axes: Any, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw a row of speed and memory for each model; ours are blue."""
    for row, (model, one) in zip(axes, models.items(), strict=True):
        colors = [OURS if name.startswith("O") else THEIRS for name in one["names"]]
        for axis, values, label, text in (
            (row[0], [value / 1000 for value in one["tokens_s"]], "thousand tokens/s\nper GPU", "{:.1f}"),
            (row[1], one["peak_gib"], "peak memory, GiB", "{:.0f}"),
        ):
            bars = axis.barh(range(len(values)), values, color=colors)
            axis.bar_label(bars, [text.format(value) for value in values], padding=3, fontsize=9)
            axis.set(xlabel=label, xlim=(0, 1.25 * max(values)))
        row[0].invert_yaxis()
        row[0].set_yticks(range(len(one["names"])), [_in_lines(name) for name in one["names"]], fontsize=9)
        row[0].set_title(textwrap.fill(model, LINE), loc="left", fontsize=10, fontweight="bold", x=-1.15)


def _curves(all_axes: Any, numbers: Numbers) -> None:
    """Draw the curves of a reproduced table or figure, in panels with one scale.

    numbers: `panels` (title -> curve's name -> x and y), `x` and `y` (labels), `log` (axes with a logarithmic scale: "", "x", "y" or "xy").
    """
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = numbers["panels"]
    several = len(panels) > 1
    for axes, (title, drawn) in zip(all_axes, panels.items(), strict=True):
        for number, (name, (xs, ys)) in enumerate(drawn.items()):
            width, style = STYLES[number % len(STYLES)]
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


def _in_lines(name: str) -> str:
    """Return a long name in two lines, the second saying how it ran; a name without that part stays on one line."""
    first, _, last = name.rpartition(", ")
    return f"{first},\n{last}" if first and len(name) > LONG_LABEL else name
