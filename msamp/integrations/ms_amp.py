"""Finds an installation of Microsoft's MS-AMP, which is imported as `msamp` too, beside this package.

In one folder, the later installation has overwritten the files that both have, `msamp/__init__.py` first of all, and uninstalling either
removes these files from the other. Where MS-AMP came later, `import msamp` is MS-AMP, and runs no line of this package; so the trainer's
commands load this file by its path (`megatron.lm.shell.exit_codes`), and it imports nothing of ours.
"""

import importlib.metadata
import warnings
from pathlib import Path

DISTRIBUTION, OWN = "ms-amp", "msamp"
_OURS = Path(__file__).resolve().parents[1]


def check_alone() -> None:
    """Where MS-AMP lies in another folder of the path, warn that `import msamp` is not it.

    Raises:
        ValueError: it lies in the folder of this package, where the files of both cannot be told apart; or files of this package are gone,
            as when MS-AMP lay there and was uninstalled.
    """
    _check_whole()
    try:
        theirs = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    folder, named = Path(str(theirs.locate_file("msamp"))), f"MS-AMP {theirs.version}"
    if folder.resolve() == _OURS:
        raise ValueError(
            f"{named} is installed in {folder.parent.resolve()} too, has the same import name msamp, and files of one have overwritten "
            f"those of the other: pip uninstall {DISTRIBUTION} msamp, then install the one of them that is wanted"
        )
    text = f"{named} is installed too ({folder.parent}); import msamp takes this package ({_OURS}): pip uninstall {DISTRIBUTION}, or keep "
    warnings.warn(text + "each in an environment of its own", stacklevel=3)


def _check_whole() -> None:
    try:
        ours = importlib.metadata.distribution(OWN)
    except importlib.metadata.PackageNotFoundError:
        return
    # A checkout has no RECORD: what it lists is what was there when it was installed, before files moved.
    if Path(str(ours.locate_file(OWN))).resolve() != _OURS or ours.read_text("RECORD") is None:
        return
    gone = [
        str(file) for file in ours.files or () if file.parts[0] == OWN and file.suffix == ".py" and not Path(str(file.locate())).exists()
    ]
    if gone:
        raise ValueError(
            f"{len(gone)} files of msamp {ours.version} are gone ({', '.join(gone[:4])}), as when {DISTRIBUTION} was installed into the "
            f"same folder and uninstalled: pip uninstall {DISTRIBUTION} msamp, then install msamp again"
        )
