"""Optimizers that store their states in low precision."""
