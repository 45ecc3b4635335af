"""Print what an issue form asks for: versions, GPUs, and the environment variables that change training.

    msamp env

It works without torch too, and then reports that torch is missing.
"""

import contextlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from megatron.lm.shell import arguments, exit_codes

PACKAGES = ("megatron-core", "triton", "transformer-engine", "torchao", "flash-attn", "numpy", "transformers", "accelerate")
PREFIXES = ("CUDA_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_")  # no others: variables may contain passwords


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    arguments.Parser(description=__doc__).parse_args(argv)
    print("\n".join(f"{name:<24}  {value}" for name, value in describe()))


def describe() -> Iterator[tuple[str, str]]:
    """Yield names and values."""
    yield "msamp", f"{msamp_version()} ({msamp_file().parents[1]})"
    yield "python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}, {len(os.sched_getaffinity(0))} CPU cores"
    if importlib.util.find_spec("torch") is None:
        yield "torch", "not installed"
    else:
        yield from _torch()
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)
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


def _torch() -> Iterator[tuple[str, str]]:
    import torch

    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield "GPU", "none: torch sees no CUDA device"
        return
    yield "cuDNN, NCCL", f"{torch.backends.cudnn.version()}, {'.'.join(map(str, torch.cuda.nccl.version()))}"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield f"GPU {number}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"


if __name__ == "__main__":
    sys.exit(main())
