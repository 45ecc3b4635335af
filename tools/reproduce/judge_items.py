"""Compare trained models item by item: documents, last words, and pairs of sentences.

A single training run per precision has no interval over seeds. What it does have is thousands of items that all models score, so that the
difference between two models has an interval over items. It covers the choice of the test items, not of the seed.

    python -m tools.reproduce.judge_items --load runs/O0 runs/O3 --text valid.jsonl \
        --last-words last_word.jsonl --pairs nounpp_english.json --out items.csv

- --text: nats of each document (context of the model's length, half of it new per window).
- --last-words: JSON lines of `evaluate last-word`; an item is correct if the model's most likely tokens are the word.
- --pairs: files in BIG-bench's form (`examples` with `input` and `target_scores`): correct if the right continuation is the likelier one.

The first --load is the baseline. --out gets a row per kind of item and model: value, and difference from the baseline with the half width
of its 95 % interval over items.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.lm.data.preprocessing.indexing import read_documents
from megatron.lm.evaluation.models import Model, Score, opened
from megatron.lm.evaluation.paired_difference import interval
from megatron.lm.evaluation.perplexity import perplexity
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, output_file, path
from megatron.lm.shell.files import read_text
from tools.bench import rows

DOCUMENTS, LAST_WORDS = "documents, bits per byte", "last words, share correct"
COLUMNS = ("kind", "model", "precision", "iteration", "items", "value", "above_base", "half_width")
BATCH = 32  # sequences per batch


class Items(NamedTuple):
    """What a model scored of one kind: the value over all items, and one number per item, whose mean is the value."""

    value: float
    each: list[float]


def documents(model: Model, texts: Sequence[str]) -> Items:
    """Return bits per byte, and of each document its share: its bits, times the number of documents, over the bytes of all."""
    size = sum(len(text.encode()) for text in texts)
    stride = max(1, model.seq_length // 2)
    bits = [perplexity(model, [text], stride=stride, batch_size=BATCH).nats / math.log(2) for text in texts]
    return Items(sum(bits) / size, [bit * len(texts) / size for bit in bits])


def last_words(model: Model, passages: Sequence[Mapping[str, str]]) -> Items:
    """Return the share of passages whose last word the model ranks first, token by token."""
    return _share([float(score.greedy) for score in _continued(model, [(item["context"], " " + item["word"]) for item in passages])])


def pairs(model: Model, examples: Sequence[Mapping[str, Any]]) -> Items:
    """Return the share of examples whose right continuation is likelier than every other."""
    asked = [
        (example["input"].rstrip(" "), " " + answer)
        for example in examples
        for answer in sorted(example["target_scores"], key=lambda answer: -example["target_scores"][answer])
    ]
    scores = iter([float(score.logprobs.double().sum()) for score in _continued(model, asked)])
    correct = []
    for example in examples:
        right, *others = (next(scores) for _ in example["target_scores"])
        correct.append(float(all(right > other for other in others)))
    return _share(correct)


def _share(correct: list[float]) -> Items:
    return Items(sum(correct) / len(correct), correct)


def _continued(model: Model, asked: Sequence[tuple[str, str]]) -> Iterator[Score]:
    """Yield the scores of continuations; a context that is too long loses its beginning."""
    for first in range(0, len(asked), BATCH):
        sequences, starts = [], []
        for context, continuation in asked[first : first + BATCH]:
            end = model.encode(continuation)
            tokens = [model.eod, *model.encode(context), *end][-model.seq_length - 1 :]
            sequences.append(tokens)
            starts.append(len(tokens) - len(end))
        yield from model.score(sequences, starts)


def judged(
    model: Model, texts: Sequence[str], passages: Sequence[Mapping[str, str]], sets: Mapping[str, Sequence[Any]]
) -> dict[str, Items]:
    """Return what a model scored, by kind of item; kinds that were not given are absent."""
    items = {DOCUMENTS: documents(model, texts)} if texts else {}
    if passages:
        items[LAST_WORDS] = last_words(model, passages)
    return items | {f"{name}, share correct": pairs(model, examples) for name, examples in sets.items()}


def compared(models: Mapping[str, Mapping[str, Items]], about: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of --out; the first model is the baseline.

    Args:
        models: by name, what each scored.
        about: by name, `precision` and `iteration` of each.
    """
    base = next(iter(models.values()))
    for kind, of_base in base.items():
        for name, of_model in models.items():
            items = of_model[kind]
            above = interval([ours - theirs for ours, theirs in zip(items.each, of_base.each, strict=True)])
            yield {
                "kind": kind,
                "model": name,
                "precision": about[name].get("precision", ""),
                "iteration": about[name].get("iteration", ""),
                "items": len(items.each),
                "value": round(items.value, 6),
                "above_base": round(above.mean, 6),
                "half_width": "" if above.half_width is None else round(above.half_width, 6),
            }


def _read(args: argparse.Namespace) -> tuple[list[str], list[Any], dict[str, list[Any]]]:
    texts = [document.texts["text"] for file in args.text for document in read_documents(file, ["text"])]
    words = [document.texts for file in args.last_words for document in read_documents(file, ["context", "word"])]
    sets = {file.stem: _examples(file)[: args.limit] for file in args.pairs}
    empty = [str(file) for file in args.pairs if not sets[file.stem]]
    if empty or not (texts or words or sets):
        raise ValueError(f"nothing to judge{' in ' + ', '.join(empty) if empty else ''}: give --text, --last-words or --pairs with items")
    return texts, words, sets


def _examples(file: Path) -> list[Any]:
    try:
        content = json.loads(read_text(file, "a file in BIG-bench's form"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error.msg}): was the file cut?") from None
    if not isinstance(content, dict) or not isinstance(content.get("examples"), list):
        raise ValueError(f"{file} has no list of examples: give a task in BIG-bench's form")
    return content["examples"]


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs="+", required=True, type=path, metavar="FOLDER", help="checkpoints; the first is the baseline")
    parser.add_argument("--text", nargs="+", default=[], type=path, metavar="FILE", help="JSON lines with {text}, one document each")
    parser.add_argument("--last-words", nargs="+", default=[], type=path, metavar="FILE", help="JSON lines with {context, word}")
    parser.add_argument("--pairs", nargs="+", default=[], type=path, metavar="FILE", help="tasks in BIG-bench's form")
    parser.add_argument("--limit", type=count(1), default=10**9, help="examples of each file of --pairs (default: all)")
    parser.add_argument("--commit", help="hash to record outside a git checkout")
    parser.add_argument("--out", required=True, type=output_file, metavar="FILE", help="CSV; replaced")
    args = parser.parse_args(argv)
    if len(set(args.load)) < len(args.load):
        raise ValueError(f"--load {' '.join(map(str, args.load))}: a model is listed twice")
    texts, words, sets = _read(args)
    models, about = {}, {}
    for load in args.load:
        with opened(load) as model:
            models[model.name], about[model.name] = judged(model, texts, words, sets), model.about
            print(f"{load}: " + "; ".join(f"{kind} {items.value:.4f}" for kind, items in models[model.name].items()), flush=True)
    machine = rows.machine(args.commit)
    rows.write(args.out, [*machine, *COLUMNS], (machine | row for row in compared(models, about)))


if __name__ == "__main__":
    sys.exit(main())
