"""Preprocessing: read documents, tokenize them, and write indexed datasets."""
