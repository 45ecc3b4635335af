"""CUDA graphs of a training step, whole or by pipeline stage, and what they can capture."""
