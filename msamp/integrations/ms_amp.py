"""Microsoft's MS-AMP, whose import name is `msamp` as well: whether the distribution is installed beside this package.

Installed into the same folder, the later of both has overwritten what they share, `msamp/__init__.py` first of all, and whichever is
uninstalled takes that along from the other.
"""

import importlib.metadata
import warnings
from pathlib import Path

DISTRIBUTION = "ms-amp"
_OURS = Path(__file__).resolve().parents[1]


def check_alone() -> None:
    """Where MS-AMP lies in another folder of the path, warn that `import msamp` is not it.

    Raises:
        ValueError: it lies in the folder of this package: which file is whose cannot be told.
    """
    try:
        theirs = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    folder, named = Path(str(theirs.locate_file("msamp"))), f"MS-AMP {theirs.version}"
    if folder.resolve() == _OURS:
        raise ValueError(
            f"{named} is installed in {folder.parent} too, has the same import name msamp, and files of one have overwritten those of "
            f"the other: pip uninstall {DISTRIBUTION} msamp, then install the one of them that is wanted"
        )
    text = f"{named} is installed too ({folder.parent}); import msamp takes this package ({_OURS}): pip uninstall {DISTRIBUTION}, or keep "
    warnings.warn(text + "each in an environment of its own", stacklevel=3)
