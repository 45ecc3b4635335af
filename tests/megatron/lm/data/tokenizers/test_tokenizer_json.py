"""Bounds of what a tokenizer.json makes of a text, against what the library makes of it."""

import base64
import json
import struct
from pathlib import Path

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from megatron.lm.data.tokenizers.tokenizer_json import EXPRESSIONS, LIMITS, check_expressions, check_text, growth, read_tokenizer_json

# A character of the largest growth for each step, and ordinary ones.
TEXTS = [
    "a",
    " ",
    "aaaa",
    "a b  c",
    "\ufdfa",
    "\u023e",
    "\U0001d1c0",
    "\u0ddd",
    "\ud7a3",
    "\u4e2d",
    "\x00",
    "\uffff",
    "\U0001f642",
    "naïve façade",
]
SMALL = {"model": {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 1}, "merges": []}}


def described(step: object) -> object:
    """The step as it is in a tokenizer.json."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    part = "normalizer" if isinstance(step, normalizers.Normalizer) else "pre_tokenizer"
    setattr(tokenizer, part, step)
    return json.loads(tokenizer.to_str())[part]


STEPS = [
    *(kind() for kind in (normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD, normalizers.Lowercase, normalizers.Strip)),
    *(kind() for kind in (normalizers.StripAccents, normalizers.Nmt, normalizers.BertNormalizer, normalizers.ByteLevel)),
    normalizers.Prepend("\u2581"),
    normalizers.Replace(" ", "\u2581"),
    normalizers.Replace("", "xyz"),
    normalizers.Replace(tokenizers.Regex("a*"), "xyz"),
    normalizers.Replace(tokenizers.Regex("(?=.)"), "xyz"),
    normalizers.Sequence(
        [normalizers.Prepend("xy"), normalizers.Replace("x", "zzz"), normalizers.Replace("z", "\ufdfa"), normalizers.NFKC()]
    ),
    pre_tokenizers.ByteLevel(),
    pre_tokenizers.Metaspace(),
    pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(use_regex=False), pre_tokenizers.ByteLevel(), pre_tokenizers.Metaspace()]),
    pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex("."), "isolated"), pre_tokenizers.ByteLevel(), pre_tokenizers.Digits()]),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_no_text_grows_more_than_the_bound(step):
    bound = growth(described(step))
    for text in TEXTS:
        if isinstance(step, normalizers.Normalizer):
            made = step.normalize_str(text)
        else:
            made = "".join(piece for piece, _ in step.pre_tokenize_str(text))
        assert len(made.encode()) <= bound * len(text.encode()), text


def test_the_bound_of_every_character_is_kept_by_unicode_forms():
    for step in (normalizers.NFC(), normalizers.NFKD(), normalizers.Lowercase(), normalizers.BertNormalizer()):
        bound = growth(described(step))
        for number in (*range(0x20, 0xD800), *range(0xE000, 0x30000)):
            assert len(step.normalize_str(chr(number)).encode()) <= bound * len(chr(number).encode())


def charsmap(*texts: bytes) -> str:
    return base64.b64encode(struct.pack("<I", 8) + bytes(8) + b"\0".join([*texts, b""])).decode()


def test_a_character_map_grows_by_its_longest_text():
    assert growth({"type": "Precompiled", "precompiled_charsmap": charsmap(b"ab", b"abcde", b"")}) == 5
    for damaged in (None, 3, "", "AA==", "!"):
        assert growth({"type": "Precompiled", "precompiled_charsmap": damaged}) == 1


REAL = {
    "Llama": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    },
    "ALBERT": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            {"type": "Precompiled", "precompiled_charsmap": charsmap(b"x" * 33)},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ],
    },
    "CLIP": {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFC"},
            {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "},
            {"type": "Lowercase"},
        ],
    },
    "BERT": {"type": "BertNormalizer"},
    "GPT-2": None,
}


@pytest.mark.parametrize("name", REAL)
def test_normalizers_of_known_models_are_accepted(tmp_path: Path, name: str):
    text = json.dumps(SMALL | {"normalizer": REAL[name]})
    (tmp_path / "tokenizer.json").write_text(text)
    assert read_tokenizer_json(tmp_path / "tokenizer.json") == (text, growth(REAL[name]))
    assert growth(REAL[name]) <= LIMITS["normalizer"]


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 13}},
            "its normalizer can make a text 8192 times as long, and",
        ),
        ({"normalizer": {"normalizers": [{"normalizers": [DOUBLE] * 7}] * 2}}, "its normalizer can make a text 16384 times as long"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 4}},
            "its pre_tokenizer can make a text 256",
        ),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 7}}, "its decoder can make a text 128 times as long, and at most 64"),
        (
            {"normalizer": [DOUBLE] * 12, "added_tokens": [{"content": "a" * 20_000, "normalized": True}]},
            "its added tokens can become 8.192e[+]07 bytes",
        ),
    ],
)
def test_what_multiplies_a_text_is_refused(tmp_path: Path, content: dict, message: str):
    (tmp_path / "tokenizer.json").write_text(json.dumps(SMALL | content))
    with pytest.raises(ValueError, match=message):
        read_tokenizer_json(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "it holds list, not an object"), ('{"a": 1, "a": 2}', "it has an entry twice"), ("{", "Expecting")]
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tokenizer_json(tmp_path / "tokenizer.json")


def test_a_text_that_grows_is_found_wherever_it_does():
    check_text("b" * 10_000 + "\ufdfa" * 10, normalizers.NFKC().normalize_str)
    with pytest.raises(ValueError, match=r"its normalizer makes \d+ bytes of the \d+ of 'b"):
        check_text("b" * 10_000 + "c" + "b" * 10_000, normalizers.Replace("c", "x" * 20_000).normalize_str)


def with_expressions(*patterns: str) -> dict[str, object]:
    """The content of a tokenizer.json with these expressions in its pre-tokenizer, one inside the other."""
    step: object = []
    for pattern in patterns:
        step = [{"type": "Sequence", "pretokenizers": step}, {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": step}}


GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_expressions_of_published_tokenizers_are_accepted():
    others = [r"(?:a)(?>b)(?=c)(?<=d)(?<!e)(?<n>f)(?i-m:g)(h)\1", r"\\g\(*\(?R", " ?[^(\\s|[.,!?…。])]+", "a" * (EXPRESSIONS // 2)]
    check_expressions(with_expressions(GPT_4O, *others))
    check_expressions({"normalizer": None, "pre_tokenizer": {"type": "Split", "pattern": {"String": r"\g<a>"}}})


CALLS = [
    r"(?<a>x\g<a>?)",
    r"(?<a>x)\k<a>",
    "(?R)",
    "(?1)",
    "(?-1)",
    "(?&a)",
    "(?P>a)",
    "(?(1)a)",
    "(?{a})",
    "(*FAIL)",
    "(?~a)",
    "(?x)a",
    "(?i-x:a)",
]


@pytest.mark.parametrize("pattern", CALLS)
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "decoder"])
def test_an_expression_without_a_bound_is_refused(pattern: str, part: str):
    step = with_expressions(GPT_4O, rf"\\\\{pattern}")["pre_tokenizer"]
    with pytest.raises(ValueError, match=r"its regular expression .* has .*: calls of groups, conditions, callouts and"):
        check_expressions({part: step})
    check_expressions({"model": step})


def test_expressions_of_any_length_are_refused():
    check_expressions(with_expressions("a" * EXPRESSIONS))
    with pytest.raises(ValueError, match=rf"its regular expressions have {EXPRESSIONS + 1} characters, and at most {EXPRESSIONS} are"):
        check_expressions(with_expressions("a" * EXPRESSIONS, "b"))
