"""Mixtures of experts: the router, and the layer that replaces a transformer layer's MLP."""
