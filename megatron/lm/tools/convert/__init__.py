"""Checkpoints in the forms of others, for convert_checkpoint.

architectures.py    which tensor of ours is which of gpt2, gpt_neox and llama
hugging_face.py     configuration and weights there and back
fp8_export.py       E4M3 weights as compressed-tensors has them
tokenizer_files.py  the tokenizer's files
"""
