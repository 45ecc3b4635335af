"""Thousands of damaged and forged files, and what may never come of them.

    make fuzz                                              all of it
    make fuzz ARGS="--checkpoints 0 --files 100"           a part
    make fuzz ARGS="--seed 7 --only checkpoints:412"       one case again
    make fuzz ARGS="--seed 7 --only checkpoints:300-2000"  the cases from 300 up to 1,999

A case is drawn from the seed, its part and its number alone. It fills a folder of its own (`box`) and runs commands in it, in a process
that serves many cases and has nothing to lose. Of every command is asked that

- it ends with 0, 1 or 2, within LIMIT_S of processor time and HANG_S by the clock;
- what it says holds no traceback, and no word of a bug; where it fails it says something;
- it writes no file outside its box, and opens none of the canary's (`Watch`, which also stops it);
- it imports no canary, and starts no process;
- where it refuses (exit code 2), the box is as it was, but for caches.

What failed is told with its seed and number, and its box is kept. A fault that was found here becomes a test of its own.
"""

import argparse
import contextlib
import dataclasses
import errno
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PARTS = {"checkpoints": 2_000, "files": 1_000}
LIMIT_S, HANG_S, START_S = 20.0, 180.0, 300.0
MEMORY_BYTES = 3 * 2**30  # that a command may ask for beyond what the process has: more would be an unjudged size
CANARY = "canary_of_the_fuzz_run"
_WRITES = ("os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate", "os.chmod", "shutil.rmtree")
_STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn")
_ASKED = ("fc-list", "uname")  # what matplotlib and `platform` ask of the system


@dataclasses.dataclass(frozen=True)
class Command:
    """One call of a main function.

    Attributes:
        name: of the program, for the report.
        main: takes the arguments; returns or leaves with an exit code.
        argv: the arguments.
        environment: variables that are set while it runs.
        caches: beginnings of names in the box that may stay where it refuses: caches are sound whatever comes after.
    """

    name: str
    main: Callable[[list[str]], int | None]
    argv: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    caches: tuple[str, ...] = ()


class Watch:
    """Sees by Python's audit hook what the process opens, writes, starts and imports while it is `armed`; a hook cannot be taken back."""

    def __init__(self, box: Path, canary: Path) -> None:
        self.box, self.canary, self.armed, self.seen = str(box), str(canary), False, list[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in _STARTS and arguments[0] not in _ASKED:
            self.seen.append(f"it started a process: {arguments[:2]!r}"[:300])
            raise PermissionError(errno.EPERM, "no process is started here")
        if event == "import" and str(arguments[0]).startswith(CANARY):
            self.seen.append("it imported the canary")
        elif event == "open":
            self._opened(*arguments)
        elif event in _WRITES:
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike) and not self._inside(path):
                    self.seen.append(f"{event} outside its folder: {path!r}")
                    raise PermissionError(errno.EPERM, "nothing is changed outside", path)

    def _opened(self, path: object, mode: object, flags: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith(self.canary):
            self.seen.append(f"it opened the canary {path!r}")
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if writes and not self._inside(path):
            self.seen.append(f"it opened for writing {path!r}")
            raise PermissionError(errno.EPERM, "nothing is written outside", path)

    def _inside(self, path: Any) -> bool:
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith(self.box):
            return True
        if not name.startswith(("/dev", "/proc")):
            return False
        if not os.path.exists(name):  # the system refuses it to whoever is not root
            raise PermissionError(errno.EPERM, "nothing is made there", path)
        return True


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder: its size and the time of its last change; of a folder that it is there."""
    found = {}
    for path in folder.rglob("*"):
        about = path.lstat()
        found[str(path.relative_to(folder))] = (-1, 0) if path.is_dir() else (about.st_size, about.st_mtime_ns)
    return found


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def call(command: Command) -> tuple[object, str, str]:
    """(exit code or what was raised, stdout, stderr), as a shell would see them: UTF-8, strictly so on stdout."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    code: object
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _environment(command.environment):
        try:
            code = command.main(list(command.argv)) or 0
        except SystemExit as leaving:
            code = leaving.code or 0
        except BaseException:  # a panic of a library's own is no Exception
            code = traceback.format_exc()
    return code, *(stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err))  # type: ignore[attr-defined, return-value]


def problems(command: Command, box: Path, watch: Watch) -> list[str]:
    """Run a command, and say what of it may not be."""
    before, started = tree(box), time.process_time()
    watch.seen.clear()
    watch.armed = True
    try:
        code, out, err = call(command)
    finally:
        watch.armed = False
    spent, found = time.process_time() - started, list(dict.fromkeys(watch.seen))
    if code not in (0, 1, 2):
        found.append(f"it ended with {code}")
    for word in ("Traceback (most recent call last)", "this is a bug"):
        if word in out + err:
            found.append(f"it says {word!r}: {err[-2500:]}")
    if code in (1, 2) and not (out + err).strip():
        found.append(f"it ended with {code} and said nothing")
    changed = {name for name, _ in tree(box).items() ^ before.items() if not command.caches or not name.startswith(command.caches)}
    if code == 2 and changed:
        found.append(f"it refused, and left behind {sorted(changed)[:4]}")
    if spent > LIMIT_S:
        found.append(f"it took {spent:.0f} s")
    return found


# ----------------------------------------------------------------------------------------------------- the process of cases


def _serve(part: str, seed: int, folder: Path, cases: Sequence[int], answers: multiprocessing.connection.Connection) -> None:
    """Run cases one after the other; before each its number is sent, after it what was wrong."""
    module, material = importlib.import_module(f"attack.fuzz_{part}"), folder / "material"
    for name in ("tmp", "box"):
        (folder / name).mkdir(exist_ok=True)
    log = (folder / "log").open("ab")
    for stream in (1, 2):  # what libraries write past Python
        os.dup2(log.fileno(), stream)
    tempfile.tempdir = str(folder / "tmp")
    # Libraries keep caches of their own: they are not ours to watch.
    os.environ |= {"TMPDIR": tempfile.tempdir, "HOME": str(folder), "MPLCONFIGDIR": str(folder / "matplotlib")}
    sys.dont_write_bytecode = True
    sys.path.append(str(folder / "canary"))
    if not material.exists():
        material.mkdir()
        module.prepare(material)
    canary = tree(folder / "canary")
    watch = Watch(folder, folder / "canary")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    answers.send(("ready", None))
    for number in cases:
        answers.send(("begin", number))
        box = folder / "box"
        shutil.rmtree(box, ignore_errors=True)
        shutil.rmtree(folder / "tmp", ignore_errors=True)
        box.mkdir()
        (folder / "tmp").mkdir()
        os.chdir(box)
        found = []
        for command in module.case(random.Random(f"{seed} {part} {number}"), material, box):
            found += [
                f"{command.name} {' '.join(map(repr, command.argv))} {command.environment or ''}\n    {text}"
                for text in problems(command, box, watch)
            ]
        if CANARY in sys.modules or tree(folder / "canary") != canary:
            found.append("the canary was touched")
        os.chdir(folder)
        answers.send(("end", found))
        if found:
            answers.recv()  # the box is kept before the next case empties it
    answers.send(("done", None))


def _canary(folder: Path) -> None:
    """What nobody may touch: a module on the path whose import shows, and a file that hostile input names."""
    (folder / "canary").mkdir()
    (folder / "canary" / f"{CANARY}.py").write_text(
        f"open({str(folder / 'canary' / 'imported')!r}, 'w').close()\n\ndef touch(*_):\n    pass\n"
    )
    (folder / "canary" / "secret.distcp").write_bytes(b"secret" * 100)


def run_part(part: str, seed: int, cases: Sequence[int], keep: Path, say: Callable[[str], None] = print) -> list[str]:
    """What was wrong in cases of a part: a text a case. A process that dies or hangs is one, and another goes on with the next case."""
    context, failures, left = multiprocessing.get_context("spawn"), list[str](), list(cases)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name).resolve()
        _canary(folder)
        while left:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(part, seed, folder, left, theirs), daemon=True)
            process.start()
            theirs.close()
            current, wait = None, START_S
            while True:
                try:
                    word, content = ours.recv() if ours.poll(wait) else ("hangs", None)
                except (EOFError, ConnectionResetError):
                    word, content = "died", None
                wait = HANG_S
                if word == "begin":
                    current, left = content, left[1:]
                elif word in ("hangs", "died", "end"):
                    process_ended = word != "end"
                    if process_ended:  # what hangs may still write
                        process.kill()
                        process.join()
                    found = [f"the process {word}: {_tail(folder / 'log')}"] if process_ended else content
                    if found:
                        kept = keep / f"{part}-{current}"
                        shutil.rmtree(kept, ignore_errors=True)
                        shutil.copytree(folder / "box", kept, symlinks=True)
                        failures.append(f"--seed {seed} --only {part}:{current} (kept in {kept})\n  " + "\n  ".join(found))
                        say(f"FAILED {failures[-1]}")
                    if word == "end" and found:
                        with contextlib.suppress(BrokenPipeError):  # it died meanwhile, which the next answer says
                            ours.send(None)
                    if process_ended:
                        left = left if current is not None else []  # it cannot even start
                        break
                elif word == "done":
                    break
            process.kill()
            process.join()
    return failures


def only(text: str) -> tuple[str, range]:
    """What --only names: a part, and the numbers of its cases."""
    part, _, numbers = text.partition(":")
    first, _, end = numbers.partition("-")
    return part, range(int(first), int(end) if end else int(first) + 1)


def _tail(log: Path) -> str:
    return log.read_bytes()[-1500:].decode("utf-8", "replace") if log.exists() else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0, or 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part, count in PARTS.items():
        parser.add_argument(f"--{part}", type=int, default=count, help="cases of this part (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of all cases (default: another each time)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default: %(default)s)")
    parser.add_argument("--only", metavar="PART:NUMBER", help="one case again, or those of PART:FROM-END, END left out")
    parser.add_argument("--keep", type=Path, default=Path("runs/fuzz"), help="folder for the boxes of what failed (default: %(default)s)")
    options = parser.parse_args(argv)
    seed, started = int(time.time()) if options.seed is None else options.seed, time.monotonic()
    print(f"seed {seed}", flush=True)
    work = {part: range(getattr(options, part)) for part in PARTS}
    if options.only:
        chosen, cases = only(options.only)
        work = {chosen: cases}
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            print(text, flush=True)

    shares = [(part, list(cases)[i :: options.jobs]) for part, cases in work.items() for i in range(options.jobs)]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(run_part, part, seed, share, options.keep.resolve(), say) for part, share in shares if share]
        failures = [text for run in runs for text in run.result()]
    counts = ", ".join(f"{len(cases)} {part}" for part, cases in work.items())
    print(f"seed {seed}: {counts}; {len(failures)} failed, in {time.monotonic() - started:.0f} s")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
