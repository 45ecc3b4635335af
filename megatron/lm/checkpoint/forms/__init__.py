"""Tensors that checkpoints store in different forms, each read as the other."""
