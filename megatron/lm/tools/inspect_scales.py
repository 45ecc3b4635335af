"""Show what the precision recorder measured: the worst tensors, and since which step they are so.

    msamp inspect runs/a/precision.jsonl

The file is the trainer's `--record-precision`. TensorBoard shows its means and maxima over the steps.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.files import read_input


@dataclass(frozen=True)
class Complaint:
    """A reason to report a tensor: `column` of its row is worse, with `low` less, than `limit`; `words` says it of a value."""

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


# Normally distributed values have 31 dB in E4M3 and 25 in E5M2: below 20, most of the range or of the elements is lost.
COMPLAINTS = (
    Complaint("underflow", 0.01, False, lambda x: f"{100 * x:.3g} % underflow"),
    Complaint("saturation", 0.001, False, lambda x: f"{100 * x:.3g} % saturated"),
    Complaint("sqnr_db", 20.0, True, lambda x: f"SQNR {x:.1f} dB"),
    Complaint("lost", 0.5, False, lambda x: f"{100 * x:.3g} % of the elements do not move"),
    Complaint("undelivered", 0.5, False, lambda x: f"{100 * x:.3g} % of the update is lost"),
    Complaint("arrived", 0.9, True, lambda x: f"{100 * x:.3g} % of the update arrives"),
)


def read(path: Path) -> list[dict[str, Any]]:
    """Read the recorded steps by iteration; of several lines for one iteration (a resumed run) the last counts, and an incomplete line is
    skipped.

    Each step has `series`: {(layer, tensor): {column: value}}, updates as the tensor "update", with `arrived`, descent / update norm.

    Raises:
        ValueError: no such file, a line that is JSON but not a recorded step, or no recorded step at all.
    """
    expected = "the file of the trainer's --record-precision"
    steps: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(read_input(path, expected).split("\n"), 1):
        try:
            step = json.loads(text)
        except (ValueError, RecursionError):
            continue  # cut off when the run was killed
        try:
            steps[step["iteration"]] = _checked(step)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path}, line {number} is not a recorded step ({error!r}): give {expected}") from None
    if not steps:
        raise ValueError(f"{path} contains no recorded step: give {expected}")
    return [steps[iteration] for iteration in sorted(steps)]


def is_number(value: Any) -> bool:
    """Return whether a value of a JSON file is a finite number, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _row(columns: Sequence[str], values: Sequence[Any]) -> dict[str, float | None]:
    """Return {column: value}, and for an update the share of it that arrives; ValueError if a value is neither a finite number nor null."""
    for value in values:
        if value is not None and not is_number(value):
            raise ValueError(f"{value!r} is not a finite number")
    row = dict(zip(columns, values, strict=True))
    if "descent" not in row:
        return row
    moved, arrived = row["update_norm"], row["descent"]
    return row | {"arrived": arrived / moved if moved and arrived is not None else None}


def _checked(step: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded step with `series` and `total`; any of several errors if it is none."""
    if type(step["iteration"]) is not int or step["iteration"] < 0:
        raise ValueError(f"iteration {step['iteration']!r} is not a count")
    casts, updates = step["columns"]["casts"], step["columns"]["updates"]
    series = {(layer, tensor): _row(casts, values) for layer, rows in step["casts"].items() for tensor, values in rows.items()}
    series |= {(name, "update"): _row(updates, values) for name, values in step["updates"].items()}
    series |= {(name, "mu"): _row(("mu",), (mu,)) for name, mu in step["mu"].items()}
    return step | {"series": series, "total": None if step.get("total") is None else _row(updates, step["total"])}


def spoken(layer: str) -> str:
    """`decoder.layers.3.mlp.linear_fc2` -> `layer 3 linear_fc2`."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(?:self_attention\.|mlp\.)?(.+)", layer)
    return f"layer {match[1]} {match[2]}" if match else layer


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
                times_worse = complaint.limit / max(value, 1e-3) if complaint.low else value / complaint.limit
                complaints.append((times_worse, f"{spoken(layer)} {tensor}: {complaint.words(value)} since step {since}"))
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


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("file", type=arguments.path, help="the file that --record-precision wrote")
    parser.add_argument("--most", type=arguments.count(1), default=10, help="tensors to report (default: %(default)s)")
    args = parser.parse_args(argv)
    print(*words(read(args.file), args.most), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
