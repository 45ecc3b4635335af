"""Print what a bug report needs: versions, GPUs with their links, and the environment variables that change training.

    msamp env
    msamp env --json

It answers in an environment without torch too, which it then reports.
"""

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from megatron.lm.shell import arguments, exit_codes

PACKAGES = (
    "megatron-core",
    "triton",
    "nvidia-cudnn-frontend",
    "transformer-engine",
    "torchao",
    "flash-attn",
    "numpy",
    "transformers",
    "accelerate",
    "lightning",
)
# No others, since variables may contain passwords.
PREFIXES = ("CUDA_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_")


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(argv)
    description = dict(describe())
    if options.json:
        print(json.dumps(description, indent=1))
        return
    width = max(map(len, description))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in description.items()))


def describe() -> Iterator[tuple[str, str]]:
    """Yield names and values, first the ones that a reader of a report looks for."""
    yield "msamp", _msamp()
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.platform()}, {len(os.sched_getaffinity(0))} CPU cores"
    if importlib.util.find_spec("torch") is None:
        yield "torch", "not installed"
    else:
        yield from _torch()
    for package in PACKAGES:
        if (installed := _version(package)) is not None:
            yield package, installed
    for name in sorted(os.environ):
        if name.startswith(PREFIXES):
            yield name, os.environ[name]


def msamp_file() -> Path:
    """Return the library's `__init__.py`, without importing it, which would import torch."""
    spec = importlib.util.find_spec("msamp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def msamp_version() -> str:
    """Return the library's version, as `setup.py` reads it."""
    match = re.search(r'^__version__ = "([^"]+)"', msamp_file().read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match[1]


def _msamp() -> str:
    """Return version, commit and folder."""
    folder = msamp_file().parents[1]
    git = _output("git", "-C", str(folder), "log", "-1", "--format=%h of %cs") if (folder / ".git").exists() else ""
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no") if git else ""
    return f"{msamp_version()}{f', commit {git}' if git else ''}{' with changes' if changed else ''} ({folder})"


def _torch() -> Iterator[tuple[str, str]]:
    import torch

    built = torch.version.cuda
    yield "torch", f"{torch.__version__}{f', CUDA {built}' if built else ', without CUDA'}"
    if not torch.cuda.is_available():
        yield "GPU", "none: torch sees no CUDA device"
        return
    from msamp.kernels.scaled_mm import fp8_hardware

    yield "driver", _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or "unknown"
    yield "cuDNN, NCCL", f"{torch.backends.cudnn.version()}, {'.'.join(map(str, torch.cuda.nccl.version()))}"
    count = torch.cuda.device_count()
    for number in range(count):
        known = torch.cuda.get_device_properties(number)
        fp8 = "FP8 GEMMs" if fp8_hardware(torch.device("cuda", number)) else "no FP8 GEMMs"
        memory = f"{known.total_memory / 2**30:.0f} GiB"
        yield f"GPU {number}", f"{known.name}, {memory}, compute capability {known.major}.{known.minor}, {fp8}"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if pairs:
        reached = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        yield "GPU to GPU", f"{reached} of {len(pairs)} directed pairs can copy directly"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*line: str) -> str:
    """Return what a command prints; empty if it fails."""
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
