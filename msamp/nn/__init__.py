"""Layers that compute in FP8, and the conversion of a model to them."""
