"""GPT pre-training on megatron-core with the low-precision recipes of msamp: `python -m megatron.lm.pretrain --help`."""
