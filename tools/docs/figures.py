"""The published figures: the numbers of each, which are stored next to it as JSON, and how they are drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.docs import gradient_sums, losses
from tools.docs.cells import PEERS, PRECISIONS, pick
from tools.docs.evidence import Row
from tools.docs.tables import STEP, best_and_same_run
from tools.reproduce.sum_orders import CHAIN

OURS, THEIRS = "#2a6fb0", "#9a9a9a"
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure to publish: its numbers, how they are drawn, and the rows that they come from, by file."""

    numbers: Numbers
    draw: Callable[[Numbers, Path], None]
    sources: Sequence[tuple[str, Sequence[Row]]]


def speed_and_memory() -> Figure:
    """The fastest measured step of each level and baseline: tokens/s and peak memory."""
    rows = [best for best, _ in best_and_same_run()]
    names = [PEERS.get(row["case"], row["case"]) for row in rows]
    numbers = {"names": names, "tokens_s": [int(row["tokens_s_gpu"]) for row in rows], "peak_gib": [float(row["peak_gib"]) for row in rows]}
    return Figure(numbers, _draw_bars, [(STEP, rows)])


def precisions() -> Figure:
    """Validation loss of every precision, with the range of its seeds."""
    rows = pick(PRECISIONS)
    keys = {"names": "precision", "loss": "valid_loss", "least": "least", "most": "most"}
    numbers = {name: [row[key] if key == "precision" else float(row[key]) for row in rows] for name, key in keys.items()}
    return Figure(numbers, _draw_ranges, [(PRECISIONS, rows)])


def fig7() -> Figure:
    """SNR of the averaged gradient by the number of ranks, for each scaling that prevents overflow of the sum."""
    rows = pick(gradient_sums.FIG7, lambda row: row["order"] == CHAIN)
    ranks = sorted({int(row["dp"]) for row in rows})
    numbers: Numbers = {"ranks": ranks, "snr_db": {}}
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        per_ranks = ([row for row in rows if row["dp"] == str(count)] for count in ranks)
        numbers["snr_db"][strategy] = [round(next(iter(gradient_sums.means(some, strategy)))[1], 4) for some in per_ranks]
    return Figure(numbers, _draw_lines, [(gradient_sums.FIG7, rows)])


def curves() -> Figure:
    """Validation loss while training, against BF16 of the same seeds."""
    tokens, apart = losses.differences()
    numbers: Numbers = {
        "tokens": tokens,
        "against_bf16": {name: [[round(x, 8) for x in triple] for triple in triples] for name, triples in apart.items()},
    }
    return Figure(numbers, _draw_curves, [(PRECISIONS, losses.rows_of_precisions([losses.BASE, *apart]))])


def axes_of(rows: int, height: float) -> tuple[Any, Any]:
    """Return axes above each other; letters of 10 points in a figure of this width are readable on a phone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(6, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def _draw_bars(numbers: Numbers, path: Path) -> None:
    figure, (speed, memory) = axes_of(2, 6.4)
    places = range(len(numbers["names"]))
    colors = [OURS if name.startswith("O") else THEIRS for name in numbers["names"]]
    for axes, values, title, text in (
        (speed, [value / 1000 for value in numbers["tokens_s"]], "thousand tokens/s", "{:.0f}k"),
        (memory, numbers["peak_gib"], "peak memory, GiB", "{:.1f}"),
    ):
        bars = axes.barh(places, values, color=colors)
        axes.bar_label(bars, [text.format(value) for value in values], padding=3)
        axes.set(title=title, xlim=(0, 1.18 * max(values)))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yticks(places, [name.replace(", ", ",\n") for name in numbers["names"]], fontsize=8)
    figure.savefig(path)


def _draw_ranges(numbers: Numbers, path: Path) -> None:
    figure, (axes,) = axes_of(1, 3.8)
    below = [loss - least for loss, least in zip(numbers["loss"], numbers["least"], strict=True)]
    above = [most - loss for loss, most in zip(numbers["loss"], numbers["most"], strict=True)]
    axes.errorbar(numbers["names"], numbers["loss"], yerr=[below, above], fmt="o", color=OURS, ecolor=THEIRS, capsize=4)
    axes.axhline(numbers["loss"][numbers["names"].index("bf16")], color=THEIRS, linewidth=0.8)
    axes.set(ylabel="validation loss, nats per token; bars: range of the seeds")
    axes.tick_params(axis="x", rotation=45)
    figure.savefig(path)


def _draw_lines(numbers: Numbers, path: Path) -> None:
    figure, (axes,) = axes_of(1, 3.6)
    for name, values in numbers["snr_db"].items():
        axes.plot(numbers["ranks"], values, marker="o", label=name)
    axes.set(xlabel="data-parallel ranks", ylabel="SNR of the average, dB", xscale="log", xticks=numbers["ranks"])
    axes.set_xticks(numbers["ranks"], [str(count) for count in numbers["ranks"]], minor=False)
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path)


def _draw_curves(numbers: Numbers, path: Path) -> None:
    figure, (axes,) = axes_of(1, 3.8)
    tokens = [count / 1e6 for count in numbers["tokens"]]
    for name, triples in numbers["against_bf16"].items():
        means, least, most = ([100 * triple[place] for triple in triples] for place in range(3))
        (line,) = axes.plot(tokens, means, marker="o", label=name)
        axes.fill_between(tokens, least, most, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.axhline(0, color=THEIRS, linewidth=0.8)
    axes.set(xlabel="million tokens", ylabel="validation loss, % from BF16\nmean and range of three seeds")
    axes.legend(ncols=3)
    figure.savefig(path)


FIGURES: dict[str, Callable[[], Figure]] = {
    "speed_and_memory": speed_and_memory,
    "precisions": precisions,
    "curves": curves,
    "fig7": fig7,
}
