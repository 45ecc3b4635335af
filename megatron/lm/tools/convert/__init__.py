"""Checkpoint formats of other libraries, for convert_checkpoint.

architectures.py    how our tensors map to those of gpt2, gpt_neox and llama
hugging_face.py     configuration and weights in both directions
fp8_export.py       E4M3 weights in the layout of compressed-tensors
tokenizer_files.py  the tokenizer's files
"""
