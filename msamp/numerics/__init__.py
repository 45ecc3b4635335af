"""Formats, scales, casts and error metrics, defined in plain torch. Every kernel is tested against these definitions."""
