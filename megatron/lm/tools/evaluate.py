"""Evaluate trained models by the bits per byte of a text. One table compares several models.

    python -m megatron.lm.tools.evaluate perplexity --load runs/quickstart/O0/checkpoint runs/quickstart/O2/checkpoint --text held_out.txt
    python -m megatron.lm.tools.evaluate last-word --text held_out.txt --output tasks/last_word.jsonl

- --load takes the trainer's checkpoints and folders of Hugging Face (to-hf and export-fp8 of convert_checkpoint), any number of them.
- Hugging Face folders need transformers: pip install -e '.[eval]'.
- Tasks run in lm-eval itself, on an export to Hugging Face; `tasks` prints the two commands.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.files import written_aside
from megatron.lm.shell.progress import Progress
from megatron.lm.tools import generate

BEFORE = 3  # sentences of context
SHORTEST = 4  # letters of the word
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_LAST = re.compile(rf"^(?P<context>.*\s)(?P<word>[A-Za-z]{{{SHORTEST},}})[.!?]$", re.DOTALL)

Rows = dict[str, dict[str, dict[str, Any]]]  # model -> task -> metric -> value


def _texts(paths: Sequence[Path], key: str) -> Iterator[str]:
    from megatron.lm.data.preprocessing.inputs import read_documents

    for path in paths:
        yield from (document.texts[key] for document in read_documents(path, [key]))


def _check_texts(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise ValueError(f"--text {path} does not exist, or is not a file: give text, or one JSON object per line")
        if path.suffix not in (".txt", ".jsonl", ".json"):
            raise ValueError(f"--text {path} is not a .txt, .jsonl or .json file: give text, or one JSON object per line")


def _write(output: Path | None, content: str) -> None:
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(output) as stream:
                stream.write(content.encode())
        except OSError as error:
            raise ValueError(f"--output {output} cannot be written ({error.strerror}): free space, or give another file") from None


def _report(rows: Rows, about: Mapping[str, Mapping[str, Any]], output: Path | None) -> None:
    results = {name: {"about": about[name], "results": values} for name, values in rows.items()}
    _write(output, json.dumps(results, indent=2) + "\n")
    print(table(rows))


def table(rows: Rows) -> str:
    """Return a Markdown table: a row per task and metric, a column per model, with standard errors where available."""
    names = list(rows)
    lines = ["| task | metric | " + " | ".join(names) + " |", "| --- | --- |" + " --- |" * len(names)]
    for task, metrics in next(iter(rows.values())).items():
        for metric in metrics:
            if "_stderr" not in metric:
                cells = [_cell(rows[name].get(task, {}), metric) for name in names]
                lines.append(f"| {task} | {metric} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: Mapping[str, Any], metric: str) -> str:
    value = values.get(metric)
    if not isinstance(value, int | float):
        return "-"
    error = values.get(f"{metric}_stderr")
    text = str(value) if isinstance(value, int) else f"{value:.4f}"
    return f"{text} ± {error:.4f}" if isinstance(error, int | float) else text


def _each(loads: Sequence[Path], measure: Callable[[Any, Progress], dict[str, dict[str, Any]]], output: Path | None) -> None:
    names = [str(load) for load in loads]
    if len(set(names)) < len(names):
        raise ValueError(f"--load {' '.join(names)}: a model is listed twice")
    with Progress(f"loading {loads[0]}") as progress:
        rows, about = _measured(loads, measure, progress)
    _report(rows, about, output)


def _measured(
    loads: Sequence[Path], measure: Callable[[Any, Progress], dict[str, dict[str, Any]]], progress: Progress
) -> tuple[Rows, dict[str, Mapping[str, Any]]]:
    from megatron.lm.evaluation.models import opened

    rows: Rows = {}
    about: dict[str, Mapping[str, Any]] = {}
    for load in loads:
        progress.begin(f"loading {load}")
        with opened(load) as model:
            print(f"{load}: {', '.join(f'{key} {value}' for key, value in model.about.items())}", file=sys.stderr, flush=True)
            rows[model.name], about[model.name] = measure(model, progress), model.about
    return rows, about


def print_perplexity(args: argparse.Namespace) -> None:
    """Measure bits per byte of texts."""
    from megatron.lm.evaluation.perplexity import perplexity

    _check_texts(args.text)

    def measure(model: Any, progress: Progress) -> dict[str, dict[str, Any]]:
        def advance(tokens: int) -> None:
            progress.done += tokens

        progress.begin(f"perplexity of {model.name}", unit="tokens")
        window = model.seq_length if args.window is None else args.window
        stride = max(1, window // 2) if args.stride is None else args.stride
        documents = _texts(args.text, args.json_key)
        result = perplexity(model, documents, stride=stride, batch_size=args.batch_size, window=window, progress=advance)
        return {"text": result.row()}

    _each(args.load, measure, args.output)


def passages(documents: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield {"context", "word"} of passages whose last word occurs in the sentences before it, in the order of the texts.

    No two share a sentence; `context` ends before the space in front of the word. The last sentence alone should not determine the word,
    but the three before it should [after LAMBADA, Paperno et al. 2016, whose passages people chose, so results are not comparable].
    """
    for text in documents:
        for paragraph in re.split(r"\n\s*\n", text):
            sentences = [re.sub(r"\s+", " ", sentence).strip() for sentence in _SENTENCE_END.split(paragraph)]
            free = 0
            for at, sentence in enumerate(sentences):
                match = _LAST.match(sentence)
                if at < free + BEFORE or match is None:
                    continue
                before = " ".join(sentences[at - BEFORE : at])
                if match["word"].lower() in (word.lower() for word in re.findall(r"[A-Za-z]+", before)):
                    yield {"context": f"{before} {match['context'].strip()}", "word": match["word"]}
                    free = at + 1


def make_last_word(args: argparse.Namespace) -> None:
    """Make a last-word set from texts."""
    _check_texts(args.text)
    lines = [json.dumps(passage, ensure_ascii=False) for passage in passages(_texts(args.text, args.json_key))]
    if not lines:
        raise ValueError(f"{' '.join(map(str, args.text))}: no sentence ends with a word that the 3 before it contain; give a longer text")
    _write(args.output, "\n".join(lines) + "\n")
    print(f"{args.output}: {len(lines)} passages")


def _parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=arguments.Parser)

    def command(name: str, run: Callable[[argparse.Namespace], None], what: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, description=what)
        added.set_defaults(run=run)
        return added

    text = command("perplexity", print_perplexity, "bits per byte and perplexity of texts")
    word = command("last-word", make_last_word, "make a set of last words from texts, for lm-eval's task last_word")
    text.add_argument("--load", nargs="+", required=True, type=arguments.path, metavar="FOLDER", help="checkpoints, Hugging Face folders")
    text.add_argument("--batch-size", type=arguments.count(1, 65536), default=8, help="sequences per batch (default: %(default)s)")
    text.add_argument("--output", type=arguments.output_file, metavar="FILE", help="results as JSON")
    for subparser in (text, word):
        subparser.add_argument(
            "--text", nargs="+", required=True, type=arguments.path, metavar="FILE", help=".txt, or .jsonl with one object per line"
        )
        subparser.add_argument(
            "--json-key", type=arguments.name, default="text", help="member that contains the text (default: %(default)s)"
        )
    text.add_argument("--window", type=arguments.count(1), help="tokens of context (default: the model's sequence length)")
    text.add_argument("--stride", type=arguments.count(1), help="tokens by which the window advances (default: half the window)")
    word.add_argument("--output", required=True, type=arguments.output_file, metavar="FILE", help="JSON lines with {context, word}")
    return parser


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["tasks"]:
        raise generate.by_export(words[1:], generate.LM_EVAL)
    args = _parser().parse_args(words)
    args.run(args)


if __name__ == "__main__":
    sys.exit(main())
