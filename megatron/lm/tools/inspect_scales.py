"""Show what the precision recorder measured, as text and plots.

    python -m megatron.lm.tools.inspect_scales runs/a/precision.jsonl --out runs/a/precision

prints the worst tensors, and since which step they are so. With --out it also writes precision.html and its plots: a heat map of layer x
step for each quantity and tensor, distributions over the layers, and the share of the updates that arrived. --out needs matplotlib (extra
`plot`). The file is the trainer's `--record-precision`.
"""

import base64
import html
import importlib.util
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.durable import written_aside
from megatron.lm.shell.files import made_folder, read_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TENSORS = ("input", "weight", "grad_output", "query", "key", "value", "grad_attention", "grad", "grad_reduced", "master", "m", "v")
QUANTITIES = {
    "sqnr_db": ("SQNR (dB)", 1.0),
    "underflow": ("underflow (%)", 100.0),
    "saturation": ("saturation (%)", 100.0),
    "scale_exponent": ("exponent of the scale, base 2", 1.0),
}
SHARED = ("sqnr_db", "underflow", "saturation")  # one color scale for all tensors; exponents and mu differ by tensor by design
NARROW = '<meta name="viewport" content="width=device-width">'  # for phones
SIZE = (5.0, 3.4)  # inches of a picture: two beside each other on a screen, one on a phone
MOST_LAYERS, MOST_STEPS = 16, 6  # named at the axes of a heat map
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}h2{font-size:1.15rem;margin-top:2rem}"
    "li{margin:.2rem 0}.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:.5rem}"
    "img{width:100%;max-width:44rem}"
)


@dataclass(frozen=True)
class Complaint:
    """Condition for reporting a tensor: `column` of its row is worse than `limit`.

    Attributes:
        column: name of the recorder's column.
        limit: worst value that is not reported.
        low: whether smaller is worse.
        words: returns the text for a value.
    """

    column: str
    limit: float
    low: bool
    words: Callable[[float], str]

    def value(self, row: Mapping[str, float | None]) -> float | None:
        """Return the column's value. `lost` is None if the row has `undelivered`: stochastic rounding leaves most elements unchanged in a
        step, but loses none of the update on average."""
        return None if self.column == "lost" and row.get("undelivered") is not None else row.get(self.column)

    def holds(self, value: float | None) -> bool:
        """Return whether a value is worse than the limit."""
        return value is not None and (value < self.limit if self.low else value > self.limit)

    def severity(self, value: float) -> float:
        """Return how many times a value is worse than the limit, which orders complaints of all kinds."""
        return self.limit / max(value, 1e-3) if self.low else value / self.limit


# Normally distributed values have 31 dB in E4M3 and 25 in E5M2: below 20, most of the range or of the elements is lost.
COMPLAINTS = (
    Complaint("underflow", 0.01, False, lambda x: f"{100 * x:.3g} % underflow"),
    Complaint("saturation", 0.001, False, lambda x: f"{100 * x:.3g} % saturated"),
    Complaint("held_down", 0.5, False, lambda x: f"one amax in the window holds the scale down by 2^{x:g}"),
    Complaint("sqnr_db", 20.0, True, lambda x: f"SQNR {x:.1f} dB"),
    Complaint("lost", 0.5, False, lambda x: f"{100 * x:.3g} % of the elements do not move"),
    Complaint("undelivered", 0.5, False, lambda x: f"{100 * x:.3g} % of the update is lost"),
    Complaint("arrived", 0.9, True, lambda x: f"{100 * x:.3g} % of the update arrives"),
)


def read(path: Path) -> list[dict[str, Any]]:
    """Read the recorded steps by iteration; of several lines for one iteration (a resumed run) the last counts, and an incomplete line is
    skipped.

    Each step has `series`: {(layer, tensor): {column: value}}, updates as the tensor "update", with `arrived`, descent / update norm; the
    line's `outliers` are the column `held_down`.

    Raises:
        ValueError: no such file, a line that is JSON but not a recorded step, or no recorded step at all.
    """
    expected = "the file of the trainer's --record-precision"
    steps: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(read_text(path, expected).split("\n"), 1):
        try:
            step = json.loads(text)
        except (ValueError, RecursionError):
            continue  # cut off when the run was killed
        try:
            steps[_iteration(step)] = dict(step) | {"series": dict(_series(step)), "total": _total_row(step)}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path}, line {number} is not a recorded step ({error!r}): give {expected}") from None
    if not steps:
        raise ValueError(f"{path} contains no recorded step: give {expected}")
    return [steps[iteration] for iteration in sorted(steps)]


def _iteration(step: Mapping[str, Any]) -> int:
    if type(step["iteration"]) is not int or not 0 <= step["iteration"] < 2**63:
        raise ValueError(f"iteration {step['iteration']!r} is not a count")
    return step["iteration"]


def _row(columns: Sequence[str], values: Sequence[Any]) -> dict[str, float | None]:
    """Return {column: value}; ValueError if a value is neither a finite number nor null."""
    return {column: None if value is None else _finite(value) for column, value in zip(columns, values, strict=True)}


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value


def _update(columns: Sequence[str], values: Sequence[Any]) -> dict[str, float | None]:
    row = _row(columns, values)
    moved, arrived = row["update_norm"], row["descent"]
    return row | {"arrived": arrived / moved if moved and arrived is not None else None}


def _total_row(step: Mapping[str, Any]) -> dict[str, float | None] | None:
    return None if step.get("total") is None else _update(step["columns"]["updates"], step["total"])


def _series(step: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, float | None]]]:
    columns = step["columns"]
    casts = {(layer, tensor): _row(columns["casts"], values) for layer, rows in step["casts"].items() for tensor, values in rows.items()}
    for layer, rows in step.get("outliers", {}).items():  # missing in older files
        for tensor, bits in rows.items():
            casts.setdefault((layer, tensor), {})["held_down"] = _finite(bits)
    yield from casts.items()
    for name, values in step["updates"].items():
        yield (name, "update"), _update(columns["updates"], values)
    for name, mu in step["mu"].items():
        yield (name, "mu"), _row(("mu",), (mu,))


def spoken(layer: str) -> str:
    """`decoder.layers.3.mlp.linear_fc2` -> `layer 3 linear_fc2`."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(?:self_attention\.|mlp\.)?(.+)", layer)
    return f"layer {match[1]} {match[2]}" if match else layer


def _order(layer: str) -> tuple[int, str]:
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", layer)
    return (int(match[1]), match[2]) if match else (1 << 30, layer)


def _tensors(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `TENSORS` and the recorded states of other updates."""
    recorded = {tensor for step in steps for _, tensor in step["series"]}
    return [*TENSORS, *sorted(recorded - {*TENSORS, "update", "mu"})]


def words(steps: Sequence[Mapping[str, Any]], most: int) -> list[str]:
    """Return a sentence for each tensor that is worse than a limit of `COMPLAINTS` at the last recorded step, the worst first, each with
    the step since which it has been so; if there are none, the worst of each quantity."""
    last = steps[-1]["series"]
    complaints: list[tuple[float, str]] = []
    for (layer, tensor), row in last.items():
        for complaint in COMPLAINTS:
            value = complaint.value(row)
            if value is not None and complaint.holds(value):
                since = steps[-1]["iteration"]
                for step in reversed(steps):
                    if not complaint.holds(complaint.value(step["series"].get((layer, tensor), {}))):
                        break
                    since = step["iteration"]
                complaints.append((complaint.severity(value), f"{spoken(layer)} {tensor}: {complaint.words(value)} since step {since}"))
    if complaints:
        sentences = [sentence for _, sentence in sorted(complaints, key=lambda pair: -pair[0])]
        rest = [f"and {len(sentences) - most} more, less bad"] if len(sentences) > most else []
        return sentences[:most] + rest
    lines = ["no tensor stands out; the worst at the last step:"]
    for complaint in COMPLAINTS:
        values = [(value, key) for key, row in last.items() if (value := complaint.value(row)) is not None]
        if values:
            value, (layer, tensor) = (min if complaint.low else max)(values)
            lines.append(f"{spoken(layer)} {tensor}: {complaint.words(value)}")
    return lines


# ----------------------------------------------------------------------------------------------------------------- pictures


def heat_maps(steps: Sequence[Mapping[str, Any]], quantity: str) -> "dict[str, Figure]":
    """Plot a quantity by layer and step, a picture per tensor; empty if no step has it."""
    from matplotlib.ticker import MaxNLocator

    tensors = ("mu",) if quantity == "mu" else _tensors(steps)
    title, factor = QUANTITIES.get(quantity, ("mu", 1.0))
    panels, fp8 = [], {layer for layer, tensor in steps[-1]["series"] if tensor == "input"}
    for tensor in tensors:
        known = {layer for step in steps for (layer, t), row in step["series"].items() if t == tensor and row.get(quantity) is not None}
        known = known & fp8 or known  # the weights of norms and biases would hide the linear layers'
        if known:
            panels.append((tensor, sorted(known, key=_order)))
    scale = _shared_scale(steps, panels, quantity, factor) if quantity in SHARED else {}
    figures = {}
    for tensor, layers in panels:
        figure, axis = _figure(tensor)
        grid = [[_value(step, layer, tensor, quantity, factor) for step in steps] for layer in layers]
        image = axis.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis_r" if quantity == "sqnr_db" else "viridis", **scale)
        bar = figure.colorbar(image, ax=axis, ticks=MaxNLocator(integer=True) if quantity == "scale_exponent" else None)
        bar.set_label(title, fontsize=9)
        bar.ax.tick_params(labelsize=8)
        axis.set_xlabel("iteration", fontsize=9)
        every = math.ceil(len(layers) / MOST_LAYERS)
        axis.set_yticks(range(0, len(layers), every), [spoken(layer) for layer in layers[::every]])
        apart = math.ceil(len(steps) / MOST_STEPS)
        axis.set_xticks(range(0, len(steps), apart), [str(step["iteration"]) for step in steps[::apart]])
        figures[tensor] = figure
    return figures


def _shared_scale(
    steps: Sequence[Mapping[str, Any]], panels: Sequence[tuple[str, list[str]]], quantity: str, factor: float
) -> dict[str, float]:
    """Return the least and the largest value of all panels, as `imshow` takes them."""
    values = [_value(step, layer, tensor, quantity, factor) for tensor, layers in panels for layer in layers for step in steps]
    finite = [value for value in values if math.isfinite(value)]
    return {"vmin": min(finite), "vmax": max(finite)} if finite else {}


def distributions(steps: Sequence[Mapping[str, Any]]) -> "dict[str, Figure]":
    """Plot underflow, saturation and SQNR over all layers at the last recorded step: a picture per quantity, a box per tensor."""
    figures = {}
    for quantity in ("sqnr_db", "underflow", "saturation"):
        title, factor = QUANTITIES[quantity]
        boxes = {}
        for tensor in _tensors(steps):
            rows = [row for (_, t), row in steps[-1]["series"].items() if t == tensor]
            boxes[tensor] = [factor * row[quantity] for row in rows if row.get(quantity) is not None]
        shown = {tensor: values for tensor, values in boxes.items() if values}
        figures[quantity], axis = _figure(f"iteration {steps[-1]['iteration']}, a box over the layers")
        if shown:
            axis.boxplot(list(shown.values()), orientation="horizontal", whis=(0, 100))
            axis.set_yticks(range(1, len(shown) + 1), list(shown))
        axis.set_xlabel(title, fontsize=9)
    return figures


def updates(steps: Sequence[Mapping[str, Any]]) -> "dict[str, Figure]":
    """Plot over the steps the share of the update that arrives, lost arithmetic, and norms of parameters and updates."""
    names = sorted({name for step in steps for name, tensor in step["series"] if tensor == "update"}, key=_order)
    iterations = [step["iteration"] for step in steps]
    figures = {}
    for column, title, factor in (
        ("arrived", "update that arrives (%)", 100.0),
        ("lost", "lost arithmetic (%)", 100.0),
        ("norm", "norm of the parameters", 1.0),
        ("update_norm", "norm of the update", 1.0),
    ):
        figures[column], axis = _figure("")
        for index, name in enumerate(names):
            values = [_value(step, name, "update", column, factor) for step in steps]
            axis.plot(iterations, values, color="#9ca3af", linewidth=0.6, label=None if index else "one parameter")
        together = [_total(step, column, factor) for step in steps]
        axis.plot(iterations, together, color="#2563eb", linewidth=2, marker="o", markersize=3, label="all parameters")
        axis.set_xlabel("iteration", fontsize=9)
        axis.set_ylabel(title, fontsize=9)
        axis.ticklabel_format(useOffset=False)
        axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    return figures


def _total(step: Mapping[str, Any], column: str, factor: float) -> float:
    if step["total"] is None:
        return math.nan
    value = step["total"].get(column)
    return math.nan if value is None else factor * value


def _value(step: Mapping[str, Any], layer: str, tensor: str, column: str, factor: float) -> float:
    value = step["series"].get((layer, tensor), {}).get(column)
    return math.nan if value is None else factor * value


def _figure(title: str) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure  # without pyplot: no display, no state between figures

    figure = Figure(figsize=SIZE, dpi=130, layout="constrained")
    axis = figure.subplots()
    axis.tick_params(labelsize=8)
    axis.set_title(title, loc="left", fontsize=10)
    return figure, axis


def write_page(steps: Sequence[Mapping[str, Any]], sentences: Sequence[str], out: Path) -> Path:
    """Write the page and its plots into the folder `out`; return the page's path. Needs matplotlib."""
    sections = {}
    for quantity in (*QUANTITIES, "mu"):
        scale = "one scale for all tensors" if quantity in SHARED else "a scale for each tensor"
        title = f"{QUANTITIES[quantity][0]}, {scale}" if quantity in QUANTITIES else "mu"
        sections[title] = {name if name == quantity else f"{quantity}-{name}": one for name, one in heat_maps(steps, quantity).items()}
    sections["Distribution over the layers"] = {f"distribution-{name}": one for name, one in distributions(steps).items()}
    sections["Updates"] = {f"update-{name}": one for name, one in updates(steps).items()}
    recorded = f"Recorded at {len(steps)} iterations, the last of them {steps[-1]['iteration']}."
    with made_folder(out):
        parts = ["<h1>Precision</h1>", f"<p>{recorded}</p>"]
        parts += ["<ul>", *(f"<li>{html.escape(sentence)}</li>" for sentence in sentences), "</ul>"]
        for title, figures in sections.items():
            parts += [f'<h2>{html.escape(title)}</h2>\n<div class="panels">'] if figures else []
            for name, figure in figures.items():
                picture = io.BytesIO()
                figure.savefig(picture, format="png")
                with written_aside(out / f"{name}.png") as stream:
                    stream.write(picture.getvalue())
                data = base64.b64encode(picture.getvalue()).decode()
                parts.append(f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">')
            parts += ["</div>"] if figures else []
        page = out / "precision.html"
        head = f'<meta charset="utf-8">{NARROW}<title>Precision</title><style>{STYLE}</style>'
        body = "\n".join(parts)
        with written_aside(page) as stream:
            stream.write(f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'.encode())
    return page


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("file", type=arguments.path, help="the file that --record-precision wrote")
    parser.add_argument("--out", type=arguments.path, help="folder for the page and its plots")
    parser.add_argument("--most", type=arguments.count(1), default=10, help="tensors to report (default: %(default)s)")
    args = parser.parse_args(argv)
    steps = read(args.file)
    sentences = words(steps, args.most)
    print(*sentences, sep="\n")
    if args.out is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--out requires matplotlib: pip install matplotlib, or drop --out")
        print(f"page: {write_page(steps, sentences, args.out)}")


if __name__ == "__main__":
    sys.exit(main())
