"""What tools read and write: text that is read or refused by name, and folders that a failure leaves as they were."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


def read_text(file: Path, what: str) -> str:
    """The UTF-8 text of a file; ValueError naming it where it is missing or holds something else. `what` says which file is wanted."""
    try:
        if file.is_char_device():  # /dev/full has no end
            raise ValueError(f"{file} is a device: give {what}")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist: give {what}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): give {what}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text ({error.reason} at byte {error.start}): give {what}") from None


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[Path]:
    """`folder`, made where it is missing. Where the block fails, a folder that was made goes with all that is in it.

    Raises:
        ValueError: it is a file, or cannot be written.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name a folder")
    with _writing(folder), _parents(folder):
        new = not folder.exists()
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        except BaseException:
            if new:
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `output` when the block ends well and is gone when it does not, with the parents made for it.

    Raises:
        ValueError: `output` is there and not an empty folder, or cannot be written (full disk, permissions).
    """
    with _writing(output):
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(f"--output {output} exists and is not an empty folder: nothing is overwritten, name another one")
        output = output.absolute()  # a name of its own also for "."
        partial = output.with_name(output.name + ".partial")
        with _parents(output):
            try:
                partial.mkdir()
            except FileExistsError:
                raise ValueError(f"{partial} exists: another conversion is writing it, or one was killed; delete it then") from None
            try:
                yield partial
                partial.rename(output)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _parents(folder: Path) -> Iterator[None]:
    """The folders above `folder`; where the block fails, those that were made go again, unless others have written there meanwhile."""
    missing = [parent for parent in folder.absolute().parents if not parent.exists()]
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in missing:  # the innermost first
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {output} ({error}): free space, or name another folder") from None
