"""The data pipeline, from text on disk to micro-batches on the device: tokenizer, indexing, datasets, batch."""
