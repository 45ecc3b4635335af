"""Command-line tools next to the trainer: `msamp --help`.

before a run    plan (the grids that fit a cluster, and their times), prepare-text (real text and its tokenizer, downloaded),
                preprocess (text of one's own -> datasets)
after it        report and compare (runs side by side), inspect (what the precision recorder saw), evaluate (bits per byte)
to elsewhere    convert, with convert/ (Hugging Face, safetensors, FP8 for inference)
"""
