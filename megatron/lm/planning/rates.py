"""Measured rates by name, from `rates.csv`, and their scaling to another GPU.

A row has the GPU of the measurement, the file of the number (`source`) and the commit. `tools/bench/derive_rates.py` computes the rows from
`tools/bench/results/`. A rate may depend on a size (`at`): between two sizes it is interpolated linearly in the logarithm of the size,
outside it equals the nearest one.
"""

import csv
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

BYTES = {"GB/s": 1e9, "TB/s": 1e12}
# How a unit scales to a GPU with another peak or bandwidth: by the ratio of the data sheets, or for a time by its inverse.
ARITHMETIC, MEMORY = ("TFLOP/s",), ("TB/s", "ps")


@dataclass(frozen=True)
class Gpu:
    """Data-sheet values of a GPU.

    Attributes:
        name: as torch returns it, up to the model.
        memory_gib: memory available to a process.
        peaks: dense TFLOP/s in BF16 and in FP8.
        memory_tb_s, link_gb_s: memory bandwidth, and NVLink bandwidth in one direction.
    """

    name: str
    memory_gib: float
    peaks: tuple[float, float]
    memory_tb_s: float
    link_gb_s: float


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "h200": Gpu("NVIDIA H200", 139.0, (989.0, 1979.0), 4.8, 450.0),
        "h100": Gpu("NVIDIA H100", 79.0, (989.0, 1979.0), 3.35, 450.0),
    }
)


@dataclass(frozen=True)
class Rate:
    """One row: `value` in `unit`; `at` is the size at which it was measured, or None."""

    gpu: str
    name: str
    at: float | None
    value: float
    unit: str
    source: str
    commit: str


@dataclass(frozen=True)
class Rates:
    """The rates of one GPU.

    Attributes:
        gpu: the GPU.
        rows: measurements, on this GPU or another.
        scaled: whether they are from another GPU.
    """

    gpu: Gpu
    rows: tuple[Rate, ...]
    scaled: bool

    def __call__(self, name: str, size: float | None = None) -> float:
        """Return the rate in SI units: FLOP/s, bytes/s, or seconds.

        Raises:
            KeyError: if no row has that name.
        """
        rows = sorted((row for row in self.rows if row.name == name), key=lambda row: row.at or 0.0)
        if not rows:
            raise KeyError(f"rates.csv has no row {name!r}")
        return _in_si(rows[0].unit) * _between(rows, size) * self._factor(rows[0])

    def _factor(self, row: Rate) -> float:
        measured_on = next(gpu for gpu in GPUS.values() if gpu.name == row.gpu)
        if row.unit in ARITHMETIC:
            return self.gpu.peaks[1] / measured_on.peaks[1]
        memory = self.gpu.memory_tb_s / measured_on.memory_tb_s
        return 1.0 if row.unit not in MEMORY else memory if row.unit == "TB/s" else 1 / memory

    @property
    def note(self) -> str:
        """Return a line on the source of the rates."""
        commits = ", ".join(sorted({row.commit for row in self.rows if row.commit}))
        rows = f"{len(self.rows)} rates measured on {self.rows[0].gpu}, commits {commits}"
        if not self.scaled:
            return f"{rows}; links between hosts: not measured"
        return (
            f"{rows}; none on {self.gpu.name}: compute-bound rates are scaled by data-sheet peaks, memory-bound rates by "
            "bandwidth; links between hosts: not measured"
        )


def _in_si(unit: str) -> float:
    return {"TFLOP/s": 1e12, "ps": 1e-12, "us": 1e-6, "share": 1.0}.get(unit) or BYTES[unit]


def _between(rows: list[Rate], size: float | None) -> float:
    if size is None or len(rows) == 1:
        return rows[0].value
    sizes = [row.at or 0.0 for row in rows]
    if size <= sizes[0]:
        return rows[0].value
    for low, high in itertools.pairwise(rows):
        if size <= (high.at or 0.0):
            share = math.log(size / (low.at or 1.0)) / math.log((high.at or 1.0) / (low.at or 1.0))
            return low.value + share * (high.value - low.value)
    return rows[-1].value


@functools.cache
def _rows() -> tuple[Rate, ...]:
    text = resources.files("megatron.lm.planning").joinpath("rates.csv").read_text(encoding="utf-8")
    return tuple(
        Rate(
            row["gpu"], row["name"], float(row["at"]) if row["at"] else None, float(row["value"]), row["unit"], row["source"], row["commit"]
        )
        for row in csv.DictReader(text.splitlines())
    )


def rates_of(gpu: str) -> Rates:
    """Return the rates of a GPU of `GPUS`: its own rows if there are any, else the H200's, scaled.

    Raises:
        ValueError: if the GPU is unknown.
    """
    if gpu not in GPUS:
        raise ValueError(f"--gpu {gpu!r} is unknown: choose one of {', '.join(GPUS)}, for which there are rates or data-sheet values")
    own = tuple(row for row in _rows() if row.gpu == GPUS[gpu].name)
    return Rates(GPUS[gpu], own or _rows(), not own)
