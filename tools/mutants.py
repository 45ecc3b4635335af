"""Apply one-line faults to a copy of this tree, one at a time, and check that the tests notice each.

    python tools/mutants.py                     every mutant of tools/mutants.toml
    python tools/mutants.py --list -k gradients list the mutants that match, run nothing

A mutant replaces a piece of one line, found by its text below a folder. Its tests are functions or files of the default run
(`make test`) that pass without the fault. The mutant is killed when one of them fails or exceeds the time limit. If all pass, the mutant
survives: no test covers that kind of fault. The list contains one mutant for each kind.
"""

import argparse
import contextlib
import dataclasses
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
PASSED, FAILED, NO_TESTS = 0, 1, 5  # pytest's exit codes
KILLED, SURVIVED, BROKEN = "killed", "survived", "could not be applied"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        kind: the part of the project: numerics, exchange, optimizer ...
        fault: what the mutant breaks, in a few words.
        under: the folder, or the file, that contains `old`.
        old: a piece of one line that occurs nowhere else below `under`.
        new: its replacement.
        tests: what should notice: the end of the path of one test file below tests/, with `::function` for one function of it.
    """

    kind: str
    fault: str
    under: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.fault}"

    def file(self, tree: Path) -> Path:
        """Return the file of `tree` that contains `old`.

        Raises:
            ValueError: it occurs nowhere or more than once (the message names the files), or old and new are not two different pieces of
                one line.
        """
        if not self.old or self.old == self.new or "\n" in self.old + self.new:
            raise ValueError(f"{self}: old and new must be two different pieces of one line")
        top = tree / self.under
        files = [top] if top.is_file() else sorted(top.rglob("*.py"))
        counts = {path: times for path in files if (times := path.read_text(encoding="utf-8").count(self.old))}
        if sum(counts.values()) != 1:
            where = ", ".join(f"{times} times in {path.relative_to(tree)}" for path, times in counts.items()) or "nowhere"
            raise ValueError(f"{self}: {self.old!r} must occur once below {self.under}, and occurs {where}; update {LIST.name}")
        return next(iter(counts))

    def test_ids(self, tree: Path) -> list[str]:
        """Return its tests in pytest's notation.

        Raises:
            ValueError: a name that is not the end of the path of one file, or a function that is not in it.
        """
        ids = []
        for name in self.tests:
            end, _, function = name.partition("::")
            matches = sorted(path for path in (tree / "tests").rglob(Path(end).name) if f"/{path.relative_to(tree)}".endswith(f"/{end}"))
            if len(matches) != 1:
                where = ", ".join(str(path.relative_to(tree)) for path in matches) or "none"
                raise ValueError(f"{self}: tests name {end!r}, which must be the end of the path of one test file, but matches {where}")
            if function and f"def {function}(" not in matches[0].read_text(encoding="utf-8"):
                raise ValueError(f"{self}: {matches[0].relative_to(tree)} has no function {function}")
            ids.append("::".join([str(matches[0].relative_to(tree)), *([function] if function else [])]))
        if not ids:
            raise ValueError(f"{self}: it names no tests that should notice it")
        return ids


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a mutant, the seconds that its tests took, and what killed it or why it is invalid."""

    mutant: Mutant
    result: str
    seconds: float
    detail: str


def read(path: Path) -> list[Mutant]:
    """Read the mutants of a list.

    Raises:
        ValueError: an entry lacks a key or has an unknown one.
    """
    names = {field.name for field in dataclasses.fields(Mutant)}
    mutants = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
        if set(row) != names:
            raise ValueError(f"{path}: mutant {row.get('fault')!r} has the keys {sorted(row)}, expected {sorted(names)}")
        mutants.append(Mutant(**(row | {"tests": tuple(row["tests"])})))
    return mutants


def check(mutants: Sequence[Mutant]) -> None:
    """Raise a ValueError that names all mutants whose text or tests are not in this tree."""
    problems = []
    for mutant in mutants:
        for look in (mutant.file, mutant.test_ids):
            try:
                look(ROOT)
            except ValueError as problem:
                problems.append(str(problem))
    if problems:
        raise ValueError("\n".join(problems))


def copy_tree(root: Path, to: Path) -> None:
    """Copy the tracked files of a git checkout, as they are in its work tree."""
    names = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, to / name)


def run_tests(tree: Path, ids: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Return pytest's exit code, or None after `limit` seconds, and its last lines; stops at the first failure."""
    # Without compiled files: two versions of a file may have the same time (in seconds) and length.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    words += ["-m", "not gpu and not multi_gpu and not nightly", *ids]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(words, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()[-3000:]


def try_out(mutant: Mutant, tree: Path, limit: float) -> Outcome:
    """Run the tests of a mutant in `tree`, which is restored afterwards."""
    started = time.monotonic()
    file, ids = mutant.file(tree), mutant.test_ids(tree)
    sound = file.read_text(encoding="utf-8")
    file.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code, output = run_tests(tree, ids, limit)
    finally:
        file.write_text(sound, encoding="utf-8")
    seconds = time.monotonic() - started
    if code is None:
        return Outcome(mutant, KILLED, seconds, f"no end within {limit:g} s")
    if code == PASSED:
        return Outcome(mutant, SURVIVED, seconds, f"{file.relative_to(tree)}, {' '.join(ids)}")
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in output.splitlines() if line.startswith("FAILED ")]
    errors = [line.removeprefix("ERROR ").split(" - ")[0] for line in output.splitlines() if line.startswith("ERROR ") and "::" in line]
    if code == FAILED and failed + errors:
        return Outcome(mutant, KILLED, seconds, (failed + errors)[0])
    reason = "they are not in the default run" if code == NO_TESTS else f"pytest ended with {code}: {output[-600:]}"
    return Outcome(mutant, BROKEN, seconds, f"its tests did not run ({reason})")


@contextlib.contextmanager
def copies(number_of: int) -> Iterator["queue.SimpleQueue[Path]"]:
    """Create `number_of` copies of this tree, each for one mutant at a time."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(number_of):
            tree = Path(folder) / str(number)
            copy_tree(ROOT, tree)
            free.put(tree)
        yield free


def run(mutants: Sequence[Mutant], jobs: int, limit: float) -> Iterator[Outcome]:
    """Yield outcomes in the order of `mutants`.

    Raises:
        ValueError: tests fail without any mutant.
    """
    with copies(jobs) as free, ThreadPoolExecutor(jobs) as pool:

        def one(mutant: Mutant) -> Outcome:
            tree = free.get()
            try:
                return try_out(mutant, tree, limit)
            finally:
                free.put(tree)

        tree = free.get()
        ids = sorted({name for mutant in mutants for name in mutant.test_ids(tree)})
        code, output = run_tests(tree, ids, limit * len(mutants))
        free.put(tree)
        if code != PASSED:
            raise ValueError(f"the tests do not pass without a mutant: {output}")
        yield from pool.map(one, mutants)


def part(text: str) -> tuple[int, int]:
    """Parse "i/n" to (i, n); argparse.ArgumentTypeError if i is not in 1 .. n."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid part: give i/n with i from 1 to n, such as 1/4")
    return int(number), int(count)


@exit_codes.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 0 if every mutant was killed, 1 if one survived, 2 if one is invalid or the tests fail without it."""
    parser = Parser(description=__doc__)
    parser.add_argument("-k", default="", metavar="TEXT", help="only mutants with this text in kind, fault, folder or tests")
    parser.add_argument("--shard", type=part, default=(1, 1), metavar="I/N", help="every N-th mutant, from the I-th on")
    parser.add_argument("--jobs", type=count(1, 1024), default=1, help="mutants at a time, each in its own copy (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one mutant (default: %(default)g)")
    parser.add_argument("--list", action="store_true", help="list the mutants and their files, run nothing")
    options = parser.parse_args(arguments)
    if not 0 < options.timeout <= 86400:
        raise ValueError(f"--timeout {options.timeout:g}: give seconds above 0, at most a day")
    started = time.monotonic()
    chosen = [m for m in read(LIST) if options.k.lower() in f"{m} {m.under} {' '.join(m.tests)}".lower()]
    chosen = chosen[options.shard[0] - 1 :: options.shard[1]]
    if not chosen:
        raise ValueError(f"no mutant has {options.k!r} in its kind, fault, folder or tests; see --list")
    check(chosen)
    if options.list:
        for m in chosen:
            print(f"{m} ({m.file(ROOT).relative_to(ROOT)})\n    {m.old}\n    {m.new}\n    {' '.join(m.tests)}")
        return 0
    outcomes = []
    for outcome in run(chosen, min(options.jobs, len(chosen)), options.timeout):
        outcomes.append(outcome)
        print(f"{outcome.result:<9} {outcome.seconds:>5.0f} s  {outcome.mutant}  [{outcome.detail}]", flush=True)
    tally = {result: sum(outcome.result == result for outcome in outcomes) for result in (KILLED, SURVIVED, BROKEN)}
    print(f"{', '.join(f'{number} {result}' for result, number in tally.items())}, in {time.monotonic() - started:.0f} s")
    return 2 if tally[BROKEN] else 1 if tally[SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
