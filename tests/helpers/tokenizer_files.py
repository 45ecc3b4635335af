"""Files of tokenizers trained on a speech: a SentencePiece model, and byte pairs in the forms of TikTokenizer, Llama 3 and Hugging Face.

model = tokenizer_files.sentence_pieces(tmp_path)
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from helpers.texts import SPEECH

TEXT = "It's the state of the Union: 1,234 words - naïve façade.\n\n  the the 🙂 end"


def sentence_pieces(folder: Path, vocab_size: int = 360, **settings: Any) -> Path:
    """A SentencePiece model in the manner of Llama 2's: byte pairs with bytes to fall back to, and the text kept as it is."""
    like_llama = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SPEECH.split(". ") * 3),
        model_writer=made,
        vocab_size=vocab_size,
        **{"model_type": "bpe", "minloglevel": 2, "num_threads": 1} | like_llama | settings,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(made.getvalue())
    return path


def byte_pairs(merges: int = 60) -> list[bytes]:
    """Tokens of a byte-level BPE in the order of their merges, after the 256 bytes."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([SPEECH], vocab_size=256 + merges, show_progress=False)
    tokens = [bytes([byte]) for byte in range(256)]
    for token, i in sorted(made.get_vocab().items(), key=lambda entry: entry[1]):
        if i >= 256:
            tokens.append(token.replace("\u0120", " ").encode())
    return tokens


def token_list(folder: Path, merges: int = 60) -> Path:
    """The file of TikTokenizer."""
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(byte_pairs(merges))
    ]
    path = folder / "tokens.json"
    path.write_text(json.dumps(entries))
    return path


def llama3(folder: Path, merges: int = 60) -> Path:
    """The file of Llama 3."""
    path = folder / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(byte_pairs(merges))))
    return path
