"""Evaluation of a trained model: bits per byte of a text, lm-eval tasks, generation. The command is `megatron.lm.tools.evaluate`."""
