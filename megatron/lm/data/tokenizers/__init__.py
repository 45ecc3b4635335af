"""Tokenizers of `--tokenizer-type`: Hugging Face `tokenizer.json`, SentencePiece, byte-level BPE, plain integers."""
