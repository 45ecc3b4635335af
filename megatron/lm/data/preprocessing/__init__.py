"""Preprocessing: read documents, tokenize them, and write indexed datasets, whole or part by part."""
