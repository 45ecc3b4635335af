"""Cleaning of training documents: duplicates, languages, quality and code. The command is `megatron.lm.tools.clean_data`."""
