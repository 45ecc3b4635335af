"""Rules for data and tokenizer: each must be complete, and exist."""

import os

from megatron.lm.config.blend_file import parse_blend, parse_split
from megatron.lm.config.sections.schema import flag
from megatron.lm.config.sections.training import DataConfig
from megatron.lm.config.whole import Config, Problems, Rules

TOKENIZER_SETTINGS = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "Llama3Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}
OPTIONAL_SETTINGS = {
    "SentencePieceTokenizer": ("legacy_tokenizer",),
    "Llama2Tokenizer": ("legacy_tokenizer",),
    "TikTokenizer": ("vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens", "tokenizer_special_tokens"),
}
SIZED = tuple(kind for kind in TOKENIZER_SETTINGS if "vocab_size" in (*TOKENIZER_SETTINGS[kind], *OPTIONAL_SETTINGS.get(kind, ())))


def datasets(config: Config, world_size: int) -> Problems:
    """The data must be complete, and exist."""
    data = config.data
    per_split = {name: getattr(data, name) for name in ("train_data_path", "valid_data_path", "test_data_path")}
    given = [flag(name) for name, words in per_split.items() if words]
    if data.mock_data or (config.logging.dry_run and not data.data_path and not given):
        return
    if not data.data_path and not data.train_data_path:
        beside = f" next to {', '.join(given)}" if given else ""
        yield (f"no training data{beside}: give --data-path PREFIX or --train-data-path PREFIX (written by msamp preprocess)")
    try:
        if not parse_split(data.split)[0]:
            yield f"--split {data.split}: give one to three numbers, the first above 0, such as 969,30,1"
    except ValueError as problem:
        yield str(problem)
    for name, words in {"data_path": data.data_path, **per_split}.items():
        yield from _blend(name, words)


def tokenizer(config: Config, world_size: int) -> Problems:
    """A tokenizer must have the settings that it requires, and no others."""
    kind = config.data.tokenizer_type
    if kind is None and config.logging.dry_run:
        return
    if kind is None:
        yield f"--tokenizer-type is missing: choose one of {', '.join(TOKENIZER_SETTINGS)}"
        return
    yield from strange_settings(config.data, config.model.vocab_size)
    names = TOKENIZER_SETTINGS.get(kind, ())
    for name in names:
        value = getattr(config.model if name == "vocab_size" else config.data, name)
        if value is None:
            yield f"--tokenizer-type {kind} needs {' and '.join(map(flag, names))}: add {flag(name)}"
        if isinstance(value, str) and not os.path.exists(value):
            yield f"{flag(name)} {value} does not exist: give the file that the data was tokenized with"
    if kind == "NullTokenizer" and config.model.vocab_size == 1:
        yield "--vocab-size 1 leaves no token except the end of document: give at least 2"


def strange_settings(data: DataConfig, vocab_size: int | None) -> Problems:
    """Every setting must belong to the tokenizer of `--tokenizer-type`."""
    owners: dict[str, list[str]] = {}
    for settings in (TOKENIZER_SETTINGS, OPTIONAL_SETTINGS):
        for owner, names in settings.items():
            for name in names:
                owners.setdefault(name, []).append(owner)
    for name, kinds in owners.items():
        value = vocab_size if name == "vocab_size" else getattr(data, name)
        if value not in (None, (), False) and data.tokenizer_type not in kinds:
            given = flag(name) if value is True else f"{flag(name)} {' '.join(value) if isinstance(value, tuple) else value}"
            yield f"{given} belongs to {', '.join(kinds)} and has no effect with --tokenizer-type {data.tokenizer_type}: drop it"


def _blend(name: str, words: tuple[str, ...]) -> Problems:
    """A blend must be valid, and its datasets must exist."""
    try:
        prefixes = parse_blend(words, flag(name)).prefixes
    except ValueError as problem:
        yield str(problem)
        return
    for prefix in prefixes:
        missing = [prefix + suffix for suffix in (".bin", ".idx") if not os.path.isfile(prefix + suffix)]
        if missing:
            lacking = f"{flag(name)} {prefix}: {' and '.join(missing)} do not exist"
            yield f"{lacking}; give the prefix of files that msamp preprocess wrote"


RULES: Rules = {
    datasets: ("data", "logging"),
    tokenizer: ("model", "data", "logging"),
}
