"""SentencePiece models for `--tokenizer-type SentencePieceTokenizer`, `GPTSentencePieceTokenizer` and `Llama2Tokenizer`.

megatron-core treats all three in the same way: the ids come from the model, and its `eos` ends a document. `--legacy-tokenizer` restores
the behavior of Megatron-LM before megatron-core had tokenizers, which older data and checkpoints need: SentencePieceTokenizer adds special
tokens after the model's ids, including `<EOD>`, which ends a document; Llama2Tokenizer begins each text with `bos`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.lm.data.tokenizers.tokenizer import MASK_CANDIDATES, SPACES, Tokenizer, library, one_line
from megatron.lm.data.tokenizers.tokenizer_json import check_text

_ADDED = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Args:
        path: path of the model (`tokenizer.model`).
        kind: the value of `--tokenizer-type`.
        legacy: add special tokens (SentencePieceTokenizer) or `bos` (Llama2Tokenizer) as older Megatron-LM.

    Raises:
        ValueError: the file is not a SentencePiece model, or has no token that ends a document.
    """

    def __init__(self, path: Path, kind: str, *, legacy: bool = False) -> None:
        sentencepiece = library("sentencepiece", kind)
        self._path, self._added = path, []  # special tokens after the model's own
        with one_line(f"--tokenizer-model {path} is not a SentencePiece model"):
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        pieces = [self._model.id_to_piece(i) for i in range(self._model.vocab_size())]
        named = {piece: i for i, piece in enumerate(pieces)}
        self._bos = [self._model.bos_id()] if legacy and kind == "Llama2Tokenizer" else []
        if self._bos == [-1]:
            raise ValueError(f"--tokenizer-model {path} has no bos token, which --legacy-tokenizer puts before each text: drop the flag")
        if legacy and kind == "SentencePieceTokenizer":
            ends = ((self._model.pad_id(), "<PAD>"), (self._model.bos_id(), "<BOS>"), (self._model.eos_id(), "<EOS>"))
            self._added = [token for token in (*_ADDED, *(name for i, name in ends if i < 0)) if token not in named]
            named |= {token: len(pieces) + i for i, token in enumerate(self._added)}
        self.vocab_size = len(pieces) + len(self._added)
        self.eod = named["<EOD>"] if legacy and kind == "SentencePieceTokenizer" else self._model.eos_id()
        if self.eod < 0:
            raise ValueError(
                f"--tokenizer-model {path} has no eos token, which ends a document: train the model with one, or use --legacy-tokenizer"
            )
        self.mask = next((named[token] for token in ("<MASK>", *MASK_CANDIDATES) if token in named), None)

    @property
    def begins_with_bos(self) -> bool:
        """Return whether each text begins with `bos`."""
        return bool(self._bos)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return the model's special tokens with the names of transformers."""
        ids = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id(), "unk_token": self._model.unk_id()}
        return {name: self._model.id_to_piece(i) for name, i in ids.items() if i >= 0}

    @property
    def is_llama_s(self) -> bool:
        """Return whether the model only adds a space before a text, as Llama's models do, and no special tokens were added."""
        return not self._added and self._model.normalize("\ufb01  x ") == "\u2581\ufb01\u2581\u2581x\u2581"

    def tokenize(self, text: str) -> list[int]:
        with one_line(f"--tokenizer-model {self._path} cannot encode the text"):
            check_text(text, self._model.normalize)  # its character map may have any replacement
            return self._bos + self._model.encode(text)

    def detokenize(self, ids: list[int]) -> str:
        self._check_ids(ids)
        own = self._model.vocab_size()
        texts, pending = [], []  # type: list[str], list[int]
        for i in ids:
            if i < own:
                pending.append(i)
                continue
            texts += [self._model.decode(pending), self._added[i - own]]
            pending = []
        return "".join([*texts, self._model.decode(pending)])

    def word_begins(self) -> np.ndarray:
        """Use the mark of a space before a piece; special tokens are words."""
        own = self._model.vocab_size()
        begins = np.ones(self.vocab_size, dtype=bool)
        for i in range(own):
            piece = self._model.id_to_piece(i)
            blank = self._model.is_byte(i) and chr(int(piece[1:-1], 16)).isspace()
            begins[i] = self._model.is_control(i) or self._model.is_unknown(i) or blank or piece.startswith(SPACES)
        return begins
