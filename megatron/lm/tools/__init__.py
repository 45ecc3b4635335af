"""Command-line tools next to the trainer: `msamp --help`.

before a run    plan (the grids that fit a cluster, and their times), prepare_text (real text and its tokenizer, downloaded),
                preprocess_data (text of one's own -> datasets)
after it        report and loss_compare (runs side by side), inspect_scales (what the precision recorder saw), evaluate (bits per byte)
to elsewhere    convert_checkpoint, with convert/ (Hugging Face, safetensors, FP8 for inference)
"""
