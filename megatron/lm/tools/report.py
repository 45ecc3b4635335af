"""Write one page about one or several training runs, from their metrics files.

    msamp report O0=a/metrics.jsonl O2=b/metrics.jsonl --out report

writes report.html with its plot embedded, the plot as loss.png, and the loss curves as curves.csv.
"""

import argparse
import base64
import csv
import html
import importlib.util
import io
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.files import read_input, written_aside
from megatron.lm.tools.inspect_scales import is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#db2777", "#0891b2")
KINDS = ("train", "valid", "test")
NUMBERS = ("loss", "tokens", "skipped", "grad_norm", "tokens_per_s", "memory_gib", "ppl", "bits_per_byte")
WIDTH = 6.0  # inches of a plot: on a phone its letters are then readable


# ------------------------------------------------------------------------------------------------------------ metrics files


@dataclass(frozen=True, kw_only=True)
class Run:
    """Content of a metrics file: its lines by kind, each list ordered by iteration."""

    name: str
    train: list[dict[str, Any]]
    valid: list[dict[str, Any]] = field(default_factory=list)
    test: list[dict[str, Any]] = field(default_factory=list)
    precision: dict[str, Any] | None = None

    @property
    def final_valid_loss(self) -> float | None:
        """Loss in nats per token at the last evaluation; None without one."""
        return self.valid[-1]["loss"] if self.valid else None


def read_run(name: str, path: Path) -> Run:
    """Read the metrics file of a training run.

    Of several lines for the same iteration (a resumed run repeats iterations) the last counts. A last line without a newline is still being
    written and is skipped. A loss of null, which the trainer writes for a non-finite one, becomes NaN.

    Raises:
        ValueError: no such file, a line that is not a JSON object of a known form, or no training line.
    """
    lines: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in KINDS}
    precision_line = None
    # By newlines only: Python's splitlines would also split at characters that JSON allows inside a string.
    for number, text in enumerate(io.StringIO(read_input(path, "the trainer's --metrics-file"), newline="\n"), 1):
        if not text.endswith("\n") or not text.strip():
            continue
        try:
            line = json.loads(text)
            kind = line["kind"]
            if kind == "precision":
                if not all(value is None or (is_number(value) and value >= 0) for value in line["bytes_per_parameter"].values()):
                    raise ValueError(f"bytes_per_parameter {line['bytes_per_parameter']!r} is not a table of numbers")
                precision_line = line
            elif kind in lines:
                lines[kind][line["iteration"]] = _judged(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not a line of metrics ({error!r}): {text.strip()[:80]}") from error
    if not lines["train"]:
        raise ValueError(f"{path} contains no training line: train for at least one --log-interval")
    by_kind = {kind: sorted(of_kind.values(), key=lambda line: line["iteration"]) for kind, of_kind in lines.items()}
    return Run(name=name, precision=precision_line, **by_kind)


def _judged(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of losses, with NaN for a loss of null; ValueError or KeyError if an entry is invalid."""
    if type(line["iteration"]) is not int or not 0 <= line["iteration"] < 2**63:
        raise ValueError(f"iteration {line['iteration']!r} is not a count")
    for name in NUMBERS:
        if line.get(name) is not None and not is_number(line[name]):
            raise ValueError(f"{name} {line[name]!r} is not a number")
    return line | {"loss": math.nan if line["loss"] is None else float(line["loss"])}


def read_meta(path: Path) -> dict[str, Any]:
    """Read the meta.json of prepared data; ValueError if it is invalid, or its unigram entropy is not a number above 0."""
    expected = "the meta.json that msamp prepare-text writes"
    try:
        meta: dict[str, Any] = json.loads(read_input(path, expected))
        entropy = meta.get("unigram_entropy_nats")
    except (json.JSONDecodeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}): give {expected}") from None
    if entropy is not None and not (is_number(entropy) and entropy > 0):
        raise ValueError(f"{path} has no unigram_entropy_nats above 0: give {expected}")
    return meta


def relative(base: float, other: float) -> float:
    """Return (other - base) / base; infinite for a base of 0, unless both are 0."""
    if base:
        return (other - base) / base
    return 0.0 if other == base else math.inf


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over `window` values around each value (fewer at the ends)."""
    before, after = window // 2, (window + 1) // 2
    return [statistics.fmean(values[max(0, i - before) : i + after]) for i in range(len(values))]


def differences(base: Run, other: Run, window: int) -> tuple[list[int], list[float]]:
    """Return the iterations that both runs logged, and (other - base) / base of the smoothed training loss at each.

    Raises:
        ValueError: the runs have no logged iteration in common.
    """
    losses = [{line["iteration"]: line["loss"] for line in run.train} for run in (base, other)]
    shared = sorted(losses[0].keys() & losses[1].keys())
    if not shared:
        raise ValueError(f"{base.name} and {other.name} logged no common iteration: train both with the same --log-interval")
    left, right = (smooth([loss[i] for i in shared], window) for loss in losses)
    return shared, [relative(a, b) for a, b in zip(left, right, strict=True)]


def named_path(text: str) -> tuple[str, Path]:
    """Parse a flag's `NAME=PATH`."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH, such as O2=runs/quickstart/O2/metrics.jsonl")
    if not name.isprintable():
        raise argparse.ArgumentTypeError(f"{name!r} cannot be printed: give the run another name")
    return name, Path(path)


# -------------------------------------------------------------------------------------------------------------------- plots


def loss_figure(runs: Sequence[Run], entropy: float | None, window: int) -> "Figure":
    """Plot the training loss (faint: each logged line; strong: smoothed) and the validation loss as points; below, the difference from the
    first run."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state between figures

    ratios, height = ((3, 1), 5.2) if len(runs) > 1 else ((1,), 3.9)
    figure = Figure(figsize=(WIDTH, height), dpi=150, layout="constrained")
    axes = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axis in axes:  # two spines, and a faint grid behind the lines
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
    top = axes[0]
    for index, (run, color) in enumerate(zip(runs, _colors(runs), strict=True)):
        iterations, losses = [line["iteration"] for line in run.train], [line["loss"] for line in run.train]
        top.plot(iterations, losses, color=color, alpha=0.2, linewidth=1)
        top.plot(iterations, smooth(losses, window), color=color, linewidth=1.8, label=f"{run.name} training")
        if run.valid:
            points = [line["iteration"] for line in run.valid], [line["loss"] for line in run.valid]
            size = max(4, 10 - 3 * index)  # equal losses overlap: the later run's point is smaller
            top.plot(*points, "o", color=color, markeredgecolor="white", markersize=size, label=f"{run.name} validation")
    if entropy is not None:
        top.axhline(entropy, color="#6b7280", linestyle="--", linewidth=1.2, label=f"unigram entropy {entropy:.2f}")
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False, ncols=2, fontsize=9)
    for run, color in zip(runs[1:], _colors(runs)[1:], strict=True):
        iterations, relative = differences(runs[0], run, window)
        axes[1].plot(iterations, [100 * d for d in relative], color=color, linewidth=1.5)
    if len(runs) > 1:
        axes[1].axhspan(-1, 1, color="#9ca3af", alpha=0.15, linewidth=0)
        axes[1].axhline(0, color=COLORS[0], linewidth=1)
        low, high = axes[1].get_ylim()
        axes[1].set_ylim(min(low, -1.5), max(high, 1.5))
        axes[1].set_ylabel(f"from {runs[0].name} (%)")
    axes[-1].set_xlabel("iteration")
    return figure


def _colors(runs: Sequence[Run]) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(runs))]


# --------------------------------------------------------------------------------------------------------------------- page


def write_report(
    runs: Sequence[Run], out: Path, *, meta: Mapping[str, Any] | None = None, window: int = 3, problems: Sequence[str] | None = None
) -> Path:
    """Write report.html, its plot and the loss curves (curves.csv) into the folder `out` (created if missing); return the page's path.

    meta: of the data (`unigram_entropy_nats` becomes a line in the plot); window: logged lines averaged by smoothing; problems: what is
    wrong with the runs, for the page to say PASS or FAILED; None where nothing was judged.
    """
    entropy = (meta or {}).get("unigram_entropy_nats")
    picture = io.BytesIO()
    loss_figure(runs, entropy, window).savefig(picture)
    out.mkdir(parents=True, exist_ok=True)
    with written_aside(out / "loss.png") as stream:
        stream.write(picture.getvalue())
    write_curves(runs, out / "curves.csv")
    page = out / "report.html"
    with written_aside(page) as stream:
        stream.write(_page(runs, picture.getvalue(), entropy, problems).encode())
    return page


CURVE_COLUMNS = ("run", "kind", "iteration", "tokens", "loss", "grad_norm", "skipped", "bits_per_byte")


def write_curves(runs: Sequence[Run], path: Path) -> None:
    """Write the training and evaluation lines of all runs as one CSV, which the repository keeps of a run."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CURVE_COLUMNS, extrasaction="ignore")
    writer.writeheader()
    for run in runs:
        writer.writerows({"run": run.name, **line} for line in (*run.train, *run.valid, *run.test))
    with written_aside(path) as stream:
        stream.write(text.getvalue().encode())


def summary(runs: Sequence[Run], entropy: float | None) -> list[str]:
    """Return two lines: the runs' final validation losses, then their differences and how far they are below the unigram entropy."""
    losses = [run.final_valid_loss for run in runs]
    first = "validation loss: " + ", ".join(
        f"{run.name} {'none' if loss is None else f'{loss:.4f}' if math.isfinite(loss) else 'not finite'}"
        for run, loss in zip(runs, losses, strict=True)
    )
    base = losses[0]
    parts = [
        f"{run.name} is {100 * relative(base, loss):+.2f} % from {runs[0].name}"
        for run, loss in zip(runs[1:], losses[1:], strict=True)
        if loss is not None and base is not None and math.isfinite(loss) and math.isfinite(base)
    ]
    if len(ends := {run.valid[-1]["iteration"] for run in runs if run.valid}) > 1:  # a run that was stopped, or is still training
        parts = [f"the last evaluations are at iterations {', '.join(map(str, sorted(ends)))}, so losses are not compared"]
    if entropy is not None and base is not None and math.isfinite(base):
        parts.append(f"{runs[0].name} is {100 * (1 - base / entropy):.1f} % below the unigram entropy of {entropy:.4f}")
    return [first, "; ".join(parts)]


def meanings(runs: Sequence[Run]) -> list[str]:
    """Return what the recipe of each run is, in a sentence; metrics files of older versions do not name it."""
    named = {run.name: str((run.precision or {}).get("recipe")) for run in runs}
    if set(named.values()) == {"None"}:
        return []
    from msamp.numerics import recipe  # torch, for seconds

    known = {name: of_run for name, of_run in named.items() if of_run in recipe.names()}
    return [f"{name}: {recipe.describe(recipe.by_name(of_run))}." for name, of_run in known.items()]


def _page(runs: Sequence[Run], picture: bytes, entropy: float | None, problems: Sequence[str] | None) -> str:
    """Fill the template `report.html`."""
    outcome = [] if problems is None else [f"FAILED: {problem}" for problem in problems] or ["PASS"]
    named = {
        "title": html.escape(", ".join(run.name for run in runs)),
        "date": time.strftime("%Y-%m-%d at %H:%M %Z"),
        "outcome": _paragraphs(outcome, "failed" if problems else "pass"),
        "summary": _paragraphs(filter(None, summary(runs, entropy)), "lead"),
        "meanings": _paragraphs(meanings(runs), ""),
        "table": _table(runs),
        "loss": f'<img alt="loss" src="data:image/png;base64,{base64.b64encode(picture).decode()}">',
    }
    return Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).substitute(named)


def _paragraphs(texts: Iterable[str], style: str) -> str:
    return "\n".join(f'<p class="{style}">{html.escape(text)}</p>' for text in texts)


def _table(runs: Sequence[Run]) -> str:  # a column per run: two fit on a phone
    lines: dict[str, list[str]] = {}
    for run in runs:
        last, valid = run.train[-1], run.valid[-1] if run.valid else {}
        speeds = [line["tokens_per_s"] for line in run.train if line.get("tokens_per_s") is not None]
        memory = [line["memory_gib"] for line in run.train if line.get("memory_gib") is not None]
        held = (run.precision or {}).get("bytes_per_parameter", {})
        for quantity, cell in (
            ("bytes per parameter of a linear layer", _cell(_linear_bytes(run), 0)),
            (
                "bytes per parameter, mean",
                html.escape(", ".join(f"{value:.3g} {name}" for name, value in held.items() if value)) or "&ndash;",
            ),
            ("iterations", str(last["iteration"])),
            ("training loss, nats per token", _cell(last["loss"], 4)),
            ("validation loss, nats per token", _cell(valid.get("loss"), 4)),
            ("perplexity", _cell(valid.get("ppl"), 2)),
            ("bits per byte", _cell(valid.get("bits_per_byte"), 3)),
            ("tokens/s, median", _cell(statistics.median(speeds) if speeds else None, 0)),
            ("peak GiB per process", _cell(max(memory, default=None), 2)),
            ("skipped steps", _cell(last.get("skipped"), 0)),
        ):
            lines.setdefault(quantity, []).append(f"<td>{cell}</td>")
    rows = {"": [f"<th>{html.escape(run.name)}</th>" for run in runs]} | lines
    return "<table>\n" + "\n".join(f"<tr><td>{name}</td>{''.join(cells)}</tr>" for name, cells in rows.items()) + "\n</table>"


def _linear_bytes(run: Run) -> float | None:
    """Return the bytes of a linear layer's weight, gradient and optimizer states; None for a metrics file that names no recipe."""
    from msamp.numerics import recipe  # torch, for seconds
    from msamp.optim.updates import format_names, update_of

    name = str((run.precision or {}).get("recipe"))
    if name not in recipe.names():
        return None
    states = format_names((known := recipe.by_name(name)).states)
    kept = [known.weight, known.states.grad, *(state.format_beside(known.weight, states) for state in update_of(states).states)]
    return sum(fmt.bytes for fmt in kept if fmt is not None)


def _cell(value: float | None, digits: int) -> str:
    return "&ndash;" if value is None else f"{value:,.{digits}f}"


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("runs", type=named_path, nargs="+", metavar="NAME=METRICS", help="runs")
    parser.add_argument("--meta", type=arguments.path, help="meta.json of the data, for its unigram entropy")
    parser.add_argument("--window", type=arguments.count(1), default=3, help="logged lines averaged by smoothing (default: %(default)s)")
    parser.add_argument("--out", type=arguments.path, required=True, help="folder to write into")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots require matplotlib: pip install matplotlib")
    runs = [read_run(name, path) for name, path in args.runs]
    meta = read_meta(args.meta) if args.meta else None
    page = write_report(runs, args.out, meta=meta, window=args.window)
    print(*summary(runs, (meta or {}).get("unigram_entropy_nats")), f"report: {page}", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
