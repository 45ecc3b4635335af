"""Evaluation of a trained model: bits per byte of a text, tasks for lm-eval, differences between runs."""
