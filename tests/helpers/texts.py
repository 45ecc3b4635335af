"""Text, a tokenizer of it, and a tiny model trained on it: for tests of what reads and tells text.

folder = texts.trained(tmp_path, opt_level="O3")     # a checkpoint; tmp_path / "tokenizer.json" is its tokenizer
"""

from pathlib import Path
from typing import Any

import tokenizers

from helpers import checkpoints
from megatron.lm.config import DataConfig
from megatron.lm.data.preprocessing.indexing import EncodeOptions, write_datasets
from megatron.lm.data.preprocessing.inputs import Document

# Of the United States' annual messages, in the public domain; with letters of two and of three bytes in UTF-8.
SPEECH = (
    "Fellow-Citizens of the Senate and House of Representatives: I embrace with great satisfaction the opportunity which now presents "
    "itself of congratulating you on the present favorable prospects of our public affairs. The recent accession of the important state of "
    "North Carolina to the Constitution of the United States, the rising credit and respectability of our country, are circumstances "
    "auspicious in an eminent degree to our national prosperity. Among the many interesting objects which will engage your attention that "
    "of providing for the common defense will merit particular regard. To be prepared for war is one of the most effectual means of "
    "preserving peace. A free people ought not only to be armed, but disciplined. \u2014 Caf\u00e9, na\u00efve."
)
SETTINGS: dict[str, Any] = {
    "vocab_size": None,
    "tokenizer_type": "HuggingFaceTokenizer",
    "seq_length": 32,
    "split": "1,0,0",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "ffn_hidden_size": 64,
    "untie_embeddings_and_output_weights": True,
    "train_iters": 8,
}


def tokenizer(folder: Path) -> Path:
    """`tokenizer.json` of byte pairs in `folder`; its end of a document is <|endoftext|>."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([SPEECH], vocab_size=300, special_tokens=["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def trained(folder: Path, **settings: Any) -> Path:
    """A checkpoint of a tiny Llama that has read the speech."""
    file = str(tokenizer(folder))
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=file)
    written = [Document(texts={"text": SPEECH}, source_bytes=1)] * 4
    write_datasets(written, {"text": folder / "speech"}, EncodeOptions(data=data), workers=0)
    name = str(settings.get("opt_level") or settings.get("precision"))
    return checkpoints.saved(folder / "speech", folder / name, **(SETTINGS | {"tokenizer_model": file} | settings))
