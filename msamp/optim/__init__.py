"""Optimizers whose states are stored in low precision."""
