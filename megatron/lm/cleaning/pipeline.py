"""Apply the cleaning rules to a corpus: workers examine documents in parallel, and duplicates are detected in input order.

The first pass writes the workers' results to parts, `OUTPUT.parts/00000.jsonl` and so on, each atomically, so a restart after a kill reuses
finished parts. The second pass reads them in order, drops duplicates, and writes the output atomically. So neither a kill nor the number of
workers changes a byte of it.
"""

import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.lm.cleaning import code, duplicates, quality
from megatron.lm.data.preprocessing import rows
from megatron.lm.shell.durable import written_aside
from megatron.lm.shell.files import parents
from megatron.lm.shell.opening import own_folder

PART_BYTES = 1 << 24  # input bytes per part: what each worker may lose in a kill
LANGUAGE_LETTERS = 10_000  # letters of a document that identify its language
_PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules for a document. A document whose text is empty after stripping is always dropped.

    Attributes:
        key: JSON field with the text.
        code: apply the rules for Python code (`megatron.lm.cleaning.code`) instead of those for text.
        quality: apply the rules for text (`megatron.lm.cleaning.quality`).
        languages: ISO 639-1 codes of accepted languages, identified by py3langid; empty accepts all.
        exact: drop exact duplicates.
        near: drop documents with at least this Jaccard similarity of word 5-grams to an earlier one, or None.

    Raises:
        ValueError: if there is no rule, languages are set for code, a language is unknown, or the threshold is out of range.
    """

    key: str = "text"
    code: bool = False
    quality: bool = False
    languages: tuple[str, ...] = ()
    exact: bool = True
    near: float | None = None

    def __post_init__(self) -> None:
        if self.code and (self.languages or self.quality):
            raise ValueError("rules for code and for text (quality, languages) cannot be combined: clean code and text separately")
        if not (self.code or self.quality or self.languages or self.exact or self.near):
            raise ValueError("no rule is selected, so there is nothing to do: choose at least one")
        duplicates.Seen(None if self.near is None else _needed("datasketch", self.near))
        if self.languages:
            known = _needed("py3langid", _identifier)().labels
            strange = [language for language in self.languages if language not in known]
            if strange:
                raise ValueError(f"language {', '.join(strange)} is unknown: give ISO 639-1 codes, such as en, de or zh")


@functools.cache
def _identifier() -> Any:
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def _needed(name: str, value: Any) -> Any:
    import importlib

    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is missing ({error}): pip install -e '.[data]'") from None
    return value


def examine(row: dict[str, Any], rules: Rules) -> dict[str, Any]:
    """Return a document's entry for the second pass: {"row"} with its cleaned text, {"dropped": why}, or {"row", "key", "minhash"}.

    Raises:
        ValueError: if the text field is missing or not text.
    """
    text = row.get(rules.key)
    if not isinstance(text, str):
        held = "is missing" if rules.key not in row else f"holds {type(text).__name__}"
        raise ValueError(f"a document's {rules.key!r} {held}, but must be text; its fields are {', '.join(map(repr, row))}")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return {"dropped": "half of a surrogate pair"}
    text = text.strip()
    if not text:
        return {"dropped": "empty"}
    problem = None
    if rules.code:
        text, problem = code.clean(text)
    if rules.languages and _identifier().classify(text[:LANGUAGE_LETTERS])[0] not in rules.languages:
        return {"dropped": "language"}
    if rules.quality:
        problem = quality.problem(text, english=not rules.languages or "en" in rules.languages)
    if problem is not None:
        return {"dropped": problem}
    result: dict[str, Any] = {"row": {**row, rules.key: text}}
    if rules.exact or rules.near is not None:
        result["key"] = duplicates.exact_key(text)
    if rules.near is not None:
        result["minhash"] = duplicates.signature(text)
    return result


def clean(
    inputs: Sequence[Path],
    output: Path,
    rules: Rules,
    *,
    workers: int = 1,
    part_bytes: int = PART_BYTES,
    say: Callable[[str], None] = lambda line: None,
) -> Counter[str]:
    """Read `inputs` in order, write the kept documents as JSON lines, and return counts: "read", "kept", "bytes kept", and drop reasons.

    The counts are also written to `OUTPUT.counts.json`.

    Raises:
        ValueError: if an input cannot be read, with all parts deleted; there are parts of a run with other input or rules; or a worker was
            killed, with finished parts kept.
    """
    plan = {"inputs": [rows.identity(path) for path in inputs], "rules": asdict(rules), "part_bytes": part_bytes}
    parts = output.with_name(output.name + ".parts")
    with parents(parts):
        _begin(parts, plan)
        try:
            examined = _first_pass(inputs, parts, rules, workers, part_bytes, say)
            counts = _second_pass(parts, examined, output, rules)
        except BrokenProcessPool:
            raise ValueError(
                f"one of {workers} workers was killed, possibly for lack of memory: use fewer; finished parts are kept"
            ) from None
        except ValueError:
            shutil.rmtree(parts, ignore_errors=True)  # the corrected command has another plan, which they would refuse
            raise
        with written_aside(output.with_name(output.name + ".counts.json")) as stream:
            stream.write((json.dumps(dict(counts), indent=2) + "\n").encode())
    shutil.rmtree(parts)
    return counts


def _begin(parts: Path, plan: dict[str, Any]) -> None:
    """Create the folder of parts, or reuse that of a run with the same plan."""
    file, text = parts / _PLAN, json.dumps(plan, indent=2) + "\n"
    if file.is_file():
        if file.read_text(encoding="utf-8") != text:
            raise ValueError(f"{parts} is from a run with other input or rules: delete it, or choose another output")
        return
    own_folder(parts)
    with written_aside(file) as stream:
        stream.write(text.encode())


def _first_pass(inputs: Sequence[Path], parts: Path, rules: Rules, workers: int, part_bytes: int, say: Callable[[str], None]) -> list[Path]:
    files: list[Path] = []

    def todo() -> Iterator[tuple[Path, list[dict[str, Any]]]]:
        for number, batch in enumerate(_batches(inputs, part_bytes)):
            files.append(parts / f"{number:05d}.jsonl")
            if not files[-1].is_file():
                yield files[-1], batch

    work = functools.partial(_write_part, rules=rules)
    for count, part in enumerate(_each(work, todo(), workers), start=1):
        say(f"{count} parts examined ({part.name})")
    return files


def _each(work: Callable[[tuple[Path, list[dict[str, Any]]]], Path], todo: Iterable[Any], workers: int) -> Iterator[Path]:
    if workers <= 0:
        yield from map(work, todo)
        return
    # Spawned, not forked: forking a process with threads can deadlock.
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting: list[concurrent.futures.Future[Path]] = []
        try:
            for entry in todo:
                waiting.append(pool.submit(work, entry))
                if len(waiting) >= 2 * workers:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()


def _batches(inputs: Sequence[Path], part_bytes: int) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    held = 0
    for row, size in itertools.chain.from_iterable(map(rows.read, inputs)):
        batch.append(row)
        held += size
        if held >= part_bytes:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _write_part(entry: tuple[Path, list[dict[str, Any]]], rules: Rules) -> Path:
    part, batch = entry
    with written_aside(part) as stream:
        for row in batch:
            stream.write(json.dumps(examine(row, rules), default=str).encode() + b"\n")
    return part


def _second_pass(parts: Path, files: list[Path], output: Path, rules: Rules) -> Counter[str]:
    counts: Counter[str] = Counter({"read": 0, "kept": 0, "bytes kept": 0})
    seen = duplicates.Seen(rules.near)
    with written_aside(output) as stream:
        for part in files:
            for line in part.read_bytes().splitlines():
                record = json.loads(line)
                counts["read"] += 1
                problem = record.get("dropped")
                if problem is None and "key" in record:
                    problem = seen.duplicate(record["key"], record.get("minhash"))
                if problem is not None:
                    counts[problem] += 1
                    continue
                stream.write(json.dumps(record["row"], ensure_ascii=False).encode() + b"\n")
                counts["kept"] += 1
                counts["bytes kept"] += len(record["row"][rules.key].encode())
    return counts
