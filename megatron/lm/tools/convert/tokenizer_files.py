"""The tokenizer's files next to the weights: which ones transformers looks for in a folder, and which ones the trainer reads."""

import shutil
from pathlib import Path
from typing import Any

from megatron.lm.config import DataConfig
from megatron.lm.data.tokenizers.tokenizer import (
    END_OF_TEXT,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
)
from megatron.lm.hugging_face.folder import refuse_irregular, write_json


def matching(data: DataConfig, given_size: int | None, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of `data`; ValueError if its files are gone, its vocabulary is not `vocab_size`, or transformers cannot read
    them. `given_size`: `--vocab-size`, for NullTokenizer."""
    tokenizer = build_tokenizer(data, given_size)
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the checkpoint has {vocab_size}: give the files that it was trained with"
        )
    plain = isinstance(tokenizer, HuggingFaceTokenizer | NullTokenizer) or data.tokenizer_type == "GPT2BPETokenizer"
    if plain or (isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.is_llama_s):
        return tokenizer
    raise ValueError(
        f"transformers cannot read the files of {data.tokenizer_type}, or computes other ids from them: "
        "convert it to a tokenizer.json, and give --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json"
    )


def write(data: DataConfig, longest: int, tokenizer: Tokenizer, folder: Path) -> None:
    """Copy the tokenizer's files into `folder` under the names that transformers' AutoTokenizer looks for; none for NullTokenizer.
    `longest`: most tokens of a sequence that the model supports."""
    about: dict[str, Any] = {"model_max_length": longest, "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, SentencePieceTokenizer):
        assert data.tokenizer_model is not None
        shutil.copyfile(data.tokenizer_model, folder / "tokenizer.model")
        adds = {"add_bos_token": tokenizer.begins_with_bos, "add_eos_token": False, "legacy": False}
        write_json(folder / "tokenizer_config.json", about | tokenizer.special_tokens | adds | {"tokenizer_class": "LlamaTokenizer"})
    elif data.tokenizer_type == "GPT2BPETokenizer":
        assert data.vocab_file is not None
        assert data.merge_file is not None
        shutil.copyfile(data.vocab_file, folder / "vocab.json")
        shutil.copyfile(data.merge_file, folder / "merges.txt")
        ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        write_json(folder / "tokenizer_config.json", about | ends | {"tokenizer_class": "GPT2Tokenizer"})
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        assert data.tokenizer_model is not None
        source = Path(data.tokenizer_model)
        shutil.copyfile(source / "tokenizer.json" if source.is_dir() else source, folder / "tokenizer.json")
        ends = dict.fromkeys(("bos_token", "eos_token"), tokenizer.detokenize([tokenizer.eod]))
        write_json(folder / "tokenizer_config.json", about | ends | {"tokenizer_class": "PreTrainedTokenizerFast"})


def settings_in(folder: Path) -> DataConfig:
    """Return the settings of the tokenizer in a Hugging Face folder; NullTokenizer if it contains none that the trainer reads."""
    refuse_irregular(folder, ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"))
    if (folder / "tokenizer.json").is_file():
        return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json"))
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        vocabulary, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
        return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)
    if (folder / "tokenizer.model").is_file():
        return DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(folder / "tokenizer.model"))
    return DataConfig(tokenizer_type="NullTokenizer")
