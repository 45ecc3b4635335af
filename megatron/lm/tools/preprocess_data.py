"""Tokenize .jsonl or .txt files into megatron-core's indexed datasets: `PREFIX_<key>_document.{bin,idx,json}`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megatron.lm.config import TOKENIZERS, DataConfig
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import DOCUMENT_SEPARATORS, check_input, read_documents
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, name, path
from megatron.lm.shell.progress import Progress

_EPILOG = """\
input forms:
  .jsonl, .json   one JSON object per line; --json-keys names the members to tokenize, each into its own dataset
  .txt            documents separated by lines with only <|endoftext|>, or by blank lines with --split-documents blank-lines

Tokenize a large corpus file by file, one --output-prefix each: --data-path takes several prefixes, and a kill loses one file's work.

example:
  msamp preprocess --input books.jsonl --output-prefix data/books --tokenizer-type GPT2BPETokenizer \\
      --vocab-file encoder.json --merge-file vocab.bpe --append-eod --workers 8
  then train with --data-path data/books_text_document
"""


@exit_codes.command
def main(argv: list[str] | None = None) -> None:
    """Run the tool; for its exit codes see `megatron.lm.shell.exit_codes`, and nothing is written if it refuses its input."""
    parser = Parser(description=__doc__, epilog=_EPILOG)
    parser.add_argument("--input", nargs="+", required=True, type=path, metavar="FILE", help=".jsonl, .json or .txt, in order")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], type=name, metavar="KEY", help="JSON members that contain text (default: text)"
    )
    parser.add_argument(
        "--split-documents", choices=DOCUMENT_SEPARATORS, default=DOCUMENT_SEPARATORS[0], help="what separates documents in a .txt file"
    )
    parser.add_argument("--output-prefix", required=True, type=name, metavar="PREFIX", help="of the new datasets PREFIX_<key>_document")
    parser.add_argument("--tokenizer-type", required=True, help=", ".join(TOKENIZERS))
    parser.add_argument("--vocab-file", type=name, help="GPT2BPETokenizer: encoder.json")
    parser.add_argument("--merge-file", type=name, help="GPT2BPETokenizer: vocab.bpe")
    parser.add_argument("--tokenizer-model", type=name, help="the file of the other tokenizers; for HuggingFaceTokenizer also its folder")
    parser.add_argument(
        "--vocab-size", type=count(2), help="NullTokenizer: number of ids, the last one ends a document; TikTokenizer (default: 131072)"
    )
    parser.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="TikTokenizer: how words are split (default: v2)")
    parser.add_argument("--tiktoken-num-special-tokens", type=count(1), help="TikTokenizer: ids for special tokens (default: 1000)")
    parser.add_argument("--tokenizer-special-tokens", nargs="+", type=name, default=[], metavar="TOKEN", help="TikTokenizer: their text")
    parser.add_argument("--legacy-tokenizer", action="store_true", help="special tokens of SentencePieceTokenizer, bos of Llama2Tokenizer")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the tokenizer's end-of-document id")
    parser.add_argument("--workers", type=count(0, 1024), default=1, help="processes that tokenize; 0: this one (default: 1)")
    parser.add_argument("--log-interval", type=count(1), metavar="N", help="of Megatron-LM's scripts; progress is a line per 5 s instead")
    arguments = parser.parse_args(argv)
    prefixes = {key: Path(f"{arguments.output_prefix}_{key}_document") for key in arguments.json_keys}
    for key, prefix in prefixes.items():
        if "/" in key:
            raise ValueError(f"--json-keys {key!r} would be part of a file name, which cannot contain /: rename the member")
        if Path(f"{prefix}.idx").exists():
            raise ValueError(f"the dataset {prefix} exists: delete it, or choose another --output-prefix, since nothing is overwritten")
    total_bytes = sum(check_input(path).stat().st_size for path in arguments.input)
    data = DataConfig(
        tokenizer_type=arguments.tokenizer_type,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        tokenizer_model=arguments.tokenizer_model,
        tiktoken_pattern=arguments.tiktoken_pattern,
        tiktoken_num_special_tokens=arguments.tiktoken_num_special_tokens,
        tokenizer_special_tokens=tuple(arguments.tokenizer_special_tokens),
        legacy_tokenizer=arguments.legacy_tokenizer,
    )
    options = EncodeOptions(data=data, vocab_size=arguments.vocab_size, append_eod=arguments.append_eod)
    documents = (document for path in arguments.input for document in read_documents(path, arguments.json_keys, arguments.split_documents))
    start = time.monotonic()
    print(f"tokenizing {total_bytes / 1e6:.1f} MB of {len(arguments.input)} inputs", file=sys.stderr, flush=True)
    with Progress("tokenizing") as progress:
        progress.begin("tokenizing", total_bytes, "bytes")
        counts = write_datasets(documents, prefixes, options, workers=arguments.workers, progress=progress)
    for key, total in counts.items():
        print(f"{prefixes[key]}: {total.documents} documents, {total.tokens} tokens ({total.dtype}), {total.text_bytes} bytes of text")
    print(f"done in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
