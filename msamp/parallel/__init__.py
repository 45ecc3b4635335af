"""Sharding of optimizer states, gradients, weights and activations over ranks."""
