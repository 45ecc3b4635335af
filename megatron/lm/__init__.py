"""GPT pre-training on megatron-core with the low-precision recipes of msamp: `msamp pretrain --help`.

Open step.py first: one training step on one screen. The root has four more files: pretrain (the entry point), build (creates the training
state), errors, and this one. The rest is in folders. A folder imports only from lines below it; `make lint` checks this (`pyproject.toml`).

tools/        command-line tools besides the trainer: data preparation, planning, conversion, generation, reports
post/         fine-tuning and RLHF of transformers models
run/          the training loop, fault handling, and reports (metrics, precision record)
evaluation/   bits per byte of a text, tasks for lm-eval, differences between runs
build.py      builds the model, its optimizer and the rest of the training state
planning/     estimates before a run: memory (`--dry-run`), step time, bytes sent, parallel layouts that fit a cluster
checkpoint/   contents of a checkpoint, saving and loading; files/ defines the format on disk
graphs/       CUDA graphs of a step, of a whole model or of a pipeline stage
step.py       one training step
training/     the training state, optimizer and schedule, gradient all-reduce, identity and health of a run
model/        the GPT, and the choice of its FP8 layers
hugging_face/ folders of Hugging Face and their models, read without running their code
data/         tokenizers, preprocessing of text, reading of datasets, batches
processes/    rendezvous, process groups, device and seeds, the grid of ranks, megatron-core without CUDA
shell/        command-line behavior: flags, files, logs, exit codes, SIGINT, torchrun without its traceback
config/       settings by section, their rules, presets, recipes from flags, recipes of the baselines
errors.py     RunStopped
"""
