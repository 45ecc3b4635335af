"""Clean a corpus: drop duplicates, other languages, poor text and poor code. Writes JSON lines, and prints what was dropped and why.

    python -m megatron.lm.tools.clean_data --input crawl.jsonl --output clean.jsonl --languages en --quality --near-duplicates 0.8
    python -m megatron.lm.tools.clean_data --input python.parquet --json-key content --output code.jsonl --code --near-duplicates 0.8
    then megatron.lm.tools.preprocess_data --input clean.jsonl ...

- --code applies the rules of FP8-LM, appendix A.3; --quality applies Gopher's. Without flags, only exact duplicates are dropped.
- Other members of a document are unchanged. Of several duplicates, the first in the order of the input is kept.
- The same command resumes where a killed one stopped. The output does not depend on the number of workers, and appears only when complete.
- --languages and --near-duplicates need py3langid and datasketch, parquet needs pyarrow: pip install -e '.[data]'.
"""

import sys
from collections.abc import Sequence

from megatron.lm.cleaning.pipeline import PART_BYTES, Rules, clean
from megatron.lm.data.preprocessing import rows
from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.progress import Progress


@exit_codes.command
def main(argv: Sequence[str] | None = None) -> None:
    """Command line; for its exit codes see `megatron.lm.shell.exit_codes`."""
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, type=arguments.path, metavar="FILE", help=rows.KINDS)
    parser.add_argument("--output", required=True, type=arguments.output_file, metavar="FILE", help="JSON lines; must not exist yet")
    parser.add_argument("--json-key", type=arguments.name, default="text", help="member that contains the text (default: %(default)s)")
    parser.add_argument("--code", action="store_true", help="the documents are Python files: the rules of FP8-LM, appendix A.3")
    parser.add_argument("--quality", action="store_true", help="the rules of Gopher for running text")
    parser.add_argument("--languages", nargs="+", type=arguments.name, default=[], metavar="CODE", help="keep these, such as en")
    parser.add_argument(
        "--near-duplicates", type=float, metavar="SIMILARITY", help="drop documents at least this similar to an earlier one, such as 0.8"
    )
    parser.add_argument("--no-exact", action="store_true", help="keep exact duplicates")
    parser.add_argument("--workers", type=arguments.count(0, 1024), default=1, help="processes; 0: in this one (default: %(default)s)")
    parser.add_argument(
        "--part-bytes",
        type=arguments.count(1),
        default=PART_BYTES,
        help="of input per part; a kill loses at most one part (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    rules = Rules(
        key=args.json_key,
        code=args.code,
        quality=args.quality,
        languages=tuple(args.languages),
        exact=not args.no_exact,
        near=args.near_duplicates,
    )
    for path in args.input:
        rows.size(path)  # refuses an invalid input before anything is written
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists: nothing is overwritten, give another file")
    with Progress(f"cleaning {len(args.input)} inputs"):
        counts = clean(
            args.input,
            args.output,
            rules,
            workers=args.workers,
            part_bytes=args.part_bytes,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(f"{args.output}: {counts['kept']} of {counts['read']} documents, {counts['bytes kept']} bytes of text")
    for why, count in sorted((why, count) for why, count in counts.items() if why not in ("read", "kept", "bytes kept")):
        print(f"  {count:8d}  {why}")


if __name__ == "__main__":
    sys.exit(main())
