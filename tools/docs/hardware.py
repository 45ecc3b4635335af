"""Supported devices, and whether measurements of each are recorded."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from tools.docs.cells import BENCH, REPRODUCE, Table
from tools.docs.evidence import ROOT, Row, read


class Device(NamedTuple):
    """A kind of device: its name, the pattern of its names in the column `gpu`, casts, GEMMs, and its state if there are no
    measurements."""

    name: str
    called: str
    casts: str
    gemm: str
    otherwise: str


KERNELS, HARDWARE, EMULATED = "Triton kernels", "in hardware", "on dequantized values"
DEVICES = (
    Device("CPU, gloo", "", "exact", EMULATED, "tested on every change"),
    Device("NVIDIA H200 (Hopper), NVLink", "H200", KERNELS, HARDWARE, "untested"),
    Device("NVIDIA H100 (Hopper)", "H100", KERNELS, HARDWARE, "untested; H200's compute capability"),
    Device("NVIDIA Ada (L4, L40S, RTX 40)", r"L4|L40S?|RTX 40\d0", KERNELS, HARDWARE, "untested"),
    Device("NVIDIA Blackwell (B100, B200, RTX 50)", r"G?B[123]00|RTX 50\d0", KERNELS, HARDWARE, "untested; MXFP8 is emulated"),
    Device("NVIDIA A100 and older", "A100|V100", "exact", EMULATED, "untested; no speedup"),
    Device("several nodes over InfiniBand", "", "", "", "untested"),
)


def measured_rows() -> list[Row]:
    """Return every recorded row that names its GPU."""
    files = sorted(path.relative_to(ROOT).as_posix() for folder in (BENCH, REPRODUCE) for path in (ROOT / folder).rglob("*.csv"))
    return [row for file in files for row in read(file) if row.get("gpu")]


def rows_of(device: Device, rows: Sequence[Row]) -> list[Row]:
    """Return the rows that were measured on a device."""
    return [row for row in rows if device.called and re.search(rf"\b({device.called})\b", row["gpu"])]


def state(device: Device, rows: Sequence[Row]) -> str:
    """Return on how many GPUs a device was measured."""
    own = rows_of(device, rows)
    if not own:
        return device.otherwise
    gpus = [str(count) for count in sorted({int(row["gpus"]) for row in own if row.get("gpus")} or {1})]
    counted = " and ".join([", ".join(gpus[:-1]), gpus[-1]]) if gpus[1:] else gpus[0]
    return f"measured on {counted} GPU{'s' if gpus != ['1'] else ''}"


def support() -> Table:
    """Return the table of devices: how each casts and multiplies, and where it was measured."""
    rows = measured_rows()
    cells = [[device.name, device.casts, device.gemm, state(device, rows)] for device in DEVICES]
    builds = {device.name: sorted({row["torch"] for row in rows_of(device, rows) if row.get("torch")}) for device in DEVICES}
    tested = "; ".join(f"{name}: torch {', '.join(versions)}" for name, versions in builds.items() if versions)
    return Table(
        ["device", "FP8 casts and scales", "FP8 GEMM", "state"],
        cells,
        (),
        f"According to the measurements in `{BENCH}` and `{REPRODUCE}`: {tested}.",
    )
