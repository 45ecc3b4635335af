"""A cluster, and the measured rates of its GPUs by name, from `rates.csv`, scaled to another GPU if there are none.

A row has the GPU of the measurement, the file of the number (`source`) and its commit. A rate may depend on a size (`at`): between two
sizes it is interpolated linearly in the logarithm of the size, outside it equals the nearest one.
"""

import csv
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import numpy as np

from megatron.lm.config import Config

UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9, "TB/s": 1e12, "us": 1e-6, "ps": 1e-12, "share": 1.0}
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


GPUS: Mapping[str, Gpu] = {
    "h200": Gpu("NVIDIA H200", 139.0, (989.0, 1979.0), 4.8, 450.0),
    "h100": Gpu("NVIDIA H100", 79.0, (989.0, 1979.0), 3.35, 450.0),
}


@dataclass(frozen=True)
class MeasuredRate:
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
    rows: tuple[MeasuredRate, ...]
    scaled: bool

    def __call__(self, name: str, size: float | None = None) -> float:
        """Return the rate in SI units: FLOP/s, bytes/s, or seconds.

        Raises:
            KeyError: if no row has that name.
        """
        rows = sorted((row for row in self.rows if row.name == name), key=lambda row: row.at or 0.0)
        if not rows:
            raise KeyError(f"rates.csv has no row {name!r}")
        value = rows[0].value
        if size is not None and len(rows) > 1:
            value = float(np.interp(math.log(size), [math.log(row.at or 1.0) for row in rows], [row.value for row in rows]))
        return UNITS[rows[0].unit] * value * self._factor(rows[0])

    def _factor(self, row: MeasuredRate) -> float:
        measured_on = next(gpu for gpu in GPUS.values() if gpu.name == row.gpu)
        if row.unit in ARITHMETIC:
            return self.gpu.peaks[1] / measured_on.peaks[1]
        memory = self.gpu.memory_tb_s / measured_on.memory_tb_s
        return 1.0 if row.unit not in MEMORY else memory if row.unit == "TB/s" else 1 / memory

    @property
    def note(self) -> str:
        """Return a line on the source of the rates."""
        rows = f"{len(self.rows)} rates measured on {self.rows[0].gpu}"
        if not self.scaled:
            return f"{rows}; links between hosts: not measured"
        return (
            f"{rows}; none on {self.gpu.name}: compute-bound rates are scaled by data-sheet peaks, memory-bound rates by "
            "bandwidth; links between hosts: not measured"
        )


@functools.cache
def _rows() -> tuple[MeasuredRate, ...]:
    text = resources.files("megatron.lm.planning").joinpath("rates.csv").read_text(encoding="utf-8")
    return tuple(
        MeasuredRate(
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


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind.

    Attributes:
        gpus, per_host: total number, and number per host.
        link: bytes/s from a GPU to others on its host, as NCCL reaches.
        network: bytes/s from a GPU to other hosts.
        latency: seconds per collective, in addition to the time for its bytes.
    """

    gpus: int
    per_host: int
    link: float
    network: float
    latency: float

    def crosses_hosts(self, config: Config) -> bool:
        """Return whether neighboring pipeline stages are on different hosts."""
        axes = config.parallel.axes(self.gpus)
        return self.gpus > self.per_host and axes.copies * axes.tensor >= self.per_host

    def link_between(self, ranks: int) -> float:
        """Return the bytes/s between this many processes with adjacent numbers: of the network if they are on several hosts."""
        return self.link if ranks <= self.per_host else self.network

    def copies(self, config: Config) -> bool:
        """Return whether tensor-parallel ranks copy the activations of FP8 layers to each other's GPUs, as `--tp-transport auto` chooses on
        a host with NVLink under sequence parallelism. The rate is of two cards; of more it is an extrapolation."""
        parallel = config.parallel
        near = parallel.tensor_model_parallel_size <= self.per_host
        return near and parallel.tp_transport != "nccl" and parallel.sequence_parallel and config.precision.recipe.gathers_fp8

    def exchange_seconds(self, size: float, config: Config) -> float:
        """Return the seconds in which each data-parallel rank sends `size` bytes in all, an equal part to every other one."""
        axes = config.parallel.axes(self.gpus)
        ranks, near = axes.copies, max(1, min(axes.copies, self.per_host // axes.tensor))  # near: on one host
        if ranks == 1:
            return 0.0
        share = size / (ranks - 1)
        return share * (near - 1) / self.link + share * (ranks - near) / self.network
