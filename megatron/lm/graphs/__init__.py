"""CUDA graphs of a training step, of the whole model or of a pipeline stage."""
