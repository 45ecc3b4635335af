"""Checkpoint formats of other libraries, for convert_checkpoint.

layouts.py          how tensors of an architecture correspond to ours
architectures.py    the architectures: gpt2, gpt_neox, llama, qwen2, qwen3, mixtral, qwen3_moe and olmoe
hugging_face.py     configuration and weights in both directions
fp8_export.py       E4M3 weights in the layout of compressed-tensors
tokenizer_files.py  the tokenizer's files
"""
