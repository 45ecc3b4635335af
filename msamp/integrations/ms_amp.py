"""Detect an installation of Microsoft's MS-AMP, whose import name is also `msamp`.

In the same folder, the later installation overwrites the files that both packages have, such as `msamp/__init__.py`, and uninstalling one
removes these files from the other. If MS-AMP was installed later, `import msamp` imports MS-AMP and runs none of this package's code.
"""

import importlib.metadata
import os
import warnings
from pathlib import Path

DISTRIBUTION = "ms-amp"
_OURS = Path(__file__).resolve().parents[1]


def check_alone() -> None:
    """If MS-AMP is in another folder of the path, warn that `import msamp` does not import it.

    Raises:
        ValueError: if it is in the same folder as this package, where one overwrote files of the other.
    """
    try:
        theirs = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    folder, named = Path(str(theirs.locate_file("msamp"))), f"MS-AMP {theirs.version}"
    if folder.resolve() == _OURS:
        raise ValueError(
            f"{named} is also installed in {folder.parent.resolve()} and has the same import name msamp, so one of them overwrote files of "
            f"the other: pip uninstall {DISTRIBUTION} msamp, then install the one that you need"
        )
    text = (
        f"{named} is also installed ({folder.parent}); import msamp imports this package ({_OURS}): pip uninstall {DISTRIBUTION}, or use "
    )
    warnings.warn(text + "separate environments", stacklevel=3)


def warn_of_accelerate() -> None:
    """Warn where accelerate is configured with `fp8_backend: MSAMP`: it looks for a distribution named ms-amp, and never calls this one."""
    if os.environ.get("ACCELERATE_FP8_BACKEND", "").upper() == "MSAMP":
        warnings.warn(
            "accelerate's fp8_backend MSAMP (ACCELERATE_FP8_BACKEND) is Microsoft's MS-AMP, not this package: delete fp8_config from "
            "accelerate's YAML, set mixed_precision to 'no' or 'bf16', and use msamp.integrations.accelerate.Accelerator(recipe='O2')",
            stacklevel=3,
        )
