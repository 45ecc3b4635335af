"""Command-line tools next to the trainer: `python -m megatron.lm.tools.NAME --help`.

before a run    plan (the grids that fit a cluster, and their times), prepare_text (real text and its tokenizer, downloaded),
                preprocess_data (text of one's own -> datasets)
after it        report and loss_compare (runs side by side), inspect_scales (what the precision recorder saw), evaluate (bits per byte)
to elsewhere    convert_checkpoint, with convert/ (Hugging Face, safetensors, FP8 for inference)
of all of them  arguments and files of `megatron.lm.shell`, paired_difference of `megatron.lm.evaluation`

Benchmarks, reproduced tables, the quick start and what judges the tests need a checkout and stay in tools/ there.
"""
