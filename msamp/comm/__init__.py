"""Gradients and weights on the wire: how they are scaled, accumulated, exchanged and counted."""
