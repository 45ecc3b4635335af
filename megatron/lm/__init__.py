"""GPT pre-training on megatron-core with the low-precision recipes of msamp: `python -m megatron.lm.pretrain --help`.

Open step.py first: one training step on one screen. Four more files are in the root: pretrain (the entry point), build (makes the state of
a run), errors, and this one. The rest is in rooms. A room imports only rooms in lines below it; `make lint` checks this (`pyproject.toml`).

tools/        what a user runs besides the trainer: data, plans, conversion, generation, reports
post/         fine-tuning and RLHF, on models of transformers
run/          a run from its first step to its last: the loop, its faults, and its reports (metrics, precision record)
evaluation/   generation with a KV cache, perplexity, lm-eval's tasks, differences between runs
build.py      builds the model, its optimizer and everything else that a run trains
planning/     what a run needs before it starts: memory (`--dry-run`), time of a step, bytes on the wire, the grids that fit a cluster
checkpoint/   what a checkpoint contains, how it is saved and loaded; files/ has its format on disk
graphs/       CUDA graphs of a step, of a whole model or of a pipeline stage
step.py       one training step
training/     the state of a run, the optimizer and its schedule, the gradient all-reduce, health, identity
model/        the GPT, and which of its linear layers gain from FP8
data/         tokenizers, datasets and batches; cleaning/ filters raw text
processes/    how processes meet, their groups, device and seeds, the grid of ranks, megatron-core without CUDA
shell/        how a command behaves: flags, files, logs, exit codes, SIGINT, torchrun without its traceback
config/       the settings by section, their rules, presets, recipes from flags, recipes of the baselines
errors.py     RunStopped
"""
