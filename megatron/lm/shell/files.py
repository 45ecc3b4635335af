"""Files of tools: read text with clear errors, and create output folders that are removed after a failure."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron.lm.shell import opening


def read_text(file: Path, what: str) -> str:
    """Return the UTF-8 text of a file, without a byte order mark; raise a ValueError with its name if it is missing or not text. `what`
    describes the expected file."""
    try:
        return opening.read_text(file).removeprefix("\ufeff")
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist: give {what}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): give {what}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): give {what}") from None


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[Path]:
    """Create `folder` if it does not exist. If the block fails, a created folder is removed with its contents.

    Raises:
        ValueError: if it is a file, or cannot be written.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder")
    new = not folder.exists()
    with _writing(folder), _parents(folder):
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        except BaseException:
            if new:
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `output` when the block succeeds, and is removed when it fails.

    Raises:
        ValueError: if `output` exists and is not an empty folder, or cannot be written (full disk, permissions).
    """
    with _writing(output):
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(f"--output {output} exists and is not an empty folder: choose another, since nothing is overwritten")
        output = output.absolute()  # so that "." has a name too
        partial = output.with_name(output.name + ".partial")
        with _parents(output):
            try:
                partial.mkdir()
            except FileExistsError:
                raise ValueError(f"{partial} exists: another conversion is writing it, or one was killed; in that case delete it") from None
            try:
                yield partial
                partial.rename(output)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _parents(folder: Path) -> Iterator[None]:
    """Create the folders above `folder`; if the block fails, remove them unless others have written there."""
    created = [parent for parent in folder.absolute().parents if not parent.exists()]
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in created:  # the innermost first
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {output} ({error}): free space, or choose another folder") from None
