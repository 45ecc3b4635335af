"""Evaluate trained models by the bits per byte of a text. One table compares several models.

    msamp evaluate runs/quickstart/O0/checkpoint runs/quickstart/O2/checkpoint --text held_out.txt

- A model is the trainer's checkpoint or a folder of Hugging Face (as `msamp convert to-hf` and export-fp8 write), any number of them.
- Hugging Face folders need transformers: pip install -e '.[eval]'.
- Tasks run in lm-eval itself, on an export to Hugging Face (docs/guide/evaluation.md).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.files import written_aside
from megatron.lm.shell.progress import Progress

Rows = dict[str, dict[str, dict[str, Any]]]  # model -> task -> metric -> value


def table(rows: Rows) -> str:
    """Return a Markdown table: a row per metric, a column per model."""
    names = list(rows)
    lines = ["| task | metric | " + " | ".join(names) + " |", "| --- | --- |" + " --- |" * len(names)]
    for task, metrics in next(iter(rows.values())).items():
        for metric in metrics:
            values = [rows[name][task][metric] for name in names]
            cells = [f"{value:.4f}" if isinstance(value, float) else str(value) for value in values]
            lines.append(f"| {task} | {metric} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def print_perplexity(args: argparse.Namespace) -> None:
    """Measure bits per byte of texts with each model, print a table, and write it to `--output`."""
    from megatron.lm.data.preprocessing.inputs import read_documents
    from megatron.lm.evaluation.models import opened
    from megatron.lm.evaluation.perplexity import perplexity

    for path in args.text:
        if not path.is_file() or path.suffix not in (".txt", ".jsonl", ".json"):
            raise ValueError(f"--text {path} is not a .txt, .jsonl or .json file: give text, or one JSON object per line")
    if len(set(args.models)) < len(args.models):
        raise ValueError(f"{' '.join(map(str, args.models))}: a model is listed twice")
    results: dict[str, dict[str, Any]] = {}
    with Progress(f"loading {args.models[0]}") as progress:

        def advance(tokens: int) -> None:
            progress.done += tokens

        for load in args.models:
            progress.begin(f"loading {load}")
            with opened(load) as model:
                progress.begin(f"perplexity of {model.name}", unit="tokens")
                window = model.seq_length if args.window is None else args.window
                stride = max(1, window // 2) if args.stride is None else args.stride
                texts = (document.texts[args.json_key] for path in args.text for document in read_documents(path, [args.json_key]))
                measured = perplexity(model, texts, stride=stride, batch_size=args.batch_size, window=window, progress=advance)
                results[model.name] = {"about": model.about, "results": {"text": measured.row()}}
            print(f"{load}: {', '.join(f'{key} {value}' for key, value in (model.about | measured.row()).items())}", file=sys.stderr)
            if args.output is not None:  # now, since a later model may fail
                args.output.parent.mkdir(parents=True, exist_ok=True)
                with written_aside(args.output) as stream:
                    stream.write((json.dumps(results, indent=2) + "\n").encode())
    print(table({name: entry["results"] for name, entry in results.items()}))


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("models", nargs="+", type=arguments.path, metavar="FOLDER", help="checkpoints, Hugging Face folders")
    parser.add_argument("--batch-size", type=arguments.count(1, 65536), default=8, help="sequences per batch (default: %(default)s)")
    parser.add_argument("--output", type=arguments.output_file, metavar="FILE", help="results as JSON")
    parser.add_argument("--text", nargs="+", required=True, type=arguments.path, metavar="FILE", help=".txt, or .jsonl with objects")
    parser.add_argument("--json-key", type=arguments.name, default="text", help="member that contains the text (default: %(default)s)")
    parser.add_argument("--window", type=arguments.count(1), help="tokens of context (default: the model's sequence length)")
    parser.add_argument("--stride", type=arguments.count(1), help="tokens by which the window advances (default: half the window)")
    print_perplexity(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
