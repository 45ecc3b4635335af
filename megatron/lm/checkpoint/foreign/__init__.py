"""Parsers and writers for checkpoints of other code. None executes a pickle."""
