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

COLORS = ("#c4c4c4", "#8c8c8c", "#7fb2e0", "#2a6fb0")  # of bars: two baselines, then ours
Numbers = dict[str, Any]
WIDTH = 5.0  # inches; letters of 9 to 10 points are then readable on a phone
STYLES: tuple[tuple[float, Any], ...] = (  # so that curves that coincide are all seen
    *((2.6, "solid"), (1.4, "solid"), (1.4, "dashed"), (1.2, "dotted"), (1.2, "dashdot"), (2.6, (0, (1, 3)))),
)
LONG_LABEL = 12  # characters next to a group of bars
LONG_NAME = 30  # characters of a curve's name, two of which do not fit next to each other


def digest(numbers: Numbers) -> str:
    """Return the hash of a figure's numbers and of what draws it."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode() + Path(__file__).read_bytes()).hexdigest()


def is_current(numbers: Numbers, path: Path) -> bool:
    """Return whether a picture was drawn from these numbers by this file."""
    return path.is_file() and digest(numbers).encode() in path.read_bytes()


def draw(numbers: Numbers, path: Path) -> None:
    """Draw a figure: bars if its numbers have groups, else curves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars, rows = "groups" in numbers, len(numbers.get("panels", [0]))
    height = 1 + len(numbers["groups"]) if bars else 3.8 if rows == 1 else 2.6 * rows
    figure = Figure(figsize=(WIDTH, height), dpi=180, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, squeeze=False, sharey=True)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=9)
        one.xaxis.label.set_size(10)
        one.yaxis.label.set_size(10)
    if bars:
        _bars(axes[0, 0], numbers["groups"], numbers["x"])
    else:
        _curves(axes[:, 0], numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Description": digest(numbers)})


def _bars(axes: Any, groups: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Draw a group of bars for each model, with a bar per system that has a number (the first model has all); ours are blue."""
    names = list(next(iter(groups.values())))
    for number, name in enumerate(names):
        speeds = {group * (len(names) + 1) + number: one[name] for group, one in enumerate(groups.values()) if name in one}
        bars = axes.barh(list(speeds), list(speeds.values()), height=0.9, color=COLORS[number], label=name)
        axes.bar_label(bars, fmt="{:.2f}", padding=3, fontsize=9)
    axes.set(xlabel=label, xlim=(0, 1.12 * max(max(one.values()) for one in groups.values())))
    axes.invert_yaxis()
    middles = [group * (len(names) + 1) + (len(names) - 1) / 2 for group in range(len(groups))]
    axes.set_yticks(middles, [textwrap.fill(name, LONG_LABEL) for name in groups], fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(-0.3, 1), ncols=2)


def _curves(all_axes: Any, numbers: Numbers) -> None:
    """Draw the curves of a reproduced table or figure, in panels with one scale.

    numbers: `panels` (title -> name -> x, y, and of a band lowest and highest), `x`, `y` (labels), `log` (logarithmic axes: "", "x", "xy").
    """
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = numbers["panels"]
    several, labelled = len(panels) > 1, [""]
    for axes, (title, drawn) in zip(all_axes, panels.items(), strict=True):
        for number, (name, (xs, ys, *band)) in enumerate(drawn.items()):
            width, style = STYLES[number % len(STYLES)]
            if band:
                axes.fill_between(xs, *band, color=f"C{number % 10}", alpha=0.2, linewidth=0)
            axes.plot(xs, ys, label=name, linewidth=width, linestyle=style)
        axes.set(xlabel=numbers["x"], ylabel=numbers["y"])
        if several:
            axes.set_title(title, loc="left", fontsize=9)
        if len(drawn) > 1 and labelled != (labelled := list(drawn)):  # else those of the panel above
            columns = 2 if max(map(len, drawn)) < LONG_NAME else 1
            place = {"fontsize": 8} if several else {"fontsize": 9, "loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": columns}
            axes.legend(frameon=False, **place)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if max(x for xs, *_ in drawn.values() for x in xs) >= 1e6:
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x else "0")
        if "x" in numbers["log"]:
            axes.set(xscale="log")
            places = sorted({x for xs, *_ in drawn.values() for x in xs})
            axes.set_xticks(places, [f"{x:g}" for x in places])
            axes.minorticks_off()
        if "y" in numbers["log"]:
            axes.set(yscale="log")
    if several:  # the first tenth of a training run would take most of a low panel
        late = [y for drawn in panels.values() for xs, ys, *_ in drawn.values() for x, y in zip(xs, ys, strict=True) if x > xs[-1] / 10]
        margin = (max(late) - min(late)) / 20
        all_axes[0].set(ylim=(min(late) - margin, max(late) + margin))
