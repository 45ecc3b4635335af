"""Parsers of checkpoints that other code wrote. None executes a pickle."""
