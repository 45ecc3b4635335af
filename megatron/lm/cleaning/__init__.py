"""Documents made fit for training: duplicates, languages, quality and code; `megatron.lm.tools.clean_data` is the command."""
