"""GPT pre-training on megatron-core with the low-precision recipes of msamp: `python -m megatron.lm.pretrain --help`.

Open step.py first: one training step on one screen. Around it, each importing only what stands above it in its group:

what is asked for   config, presets, checks, cli; recipe (numbers), gain (which layers gain from FP8), capture (what CUDA graphs can
                    hold), plan (what will fit)
where it runs       rendezvous (how processes meet), process_groups (makes the groups, device, seeds), grid (which ranks do what
                    together), cpu_home (without CUDA)
what is trained     model/, data/, distributed (gradients), optim (update and schedule), training (the state), build (makes it)
one step            step; graph (the same step replayed), stage_graph (on a pipeline), replay (what both share), recorder (what it
                    lost), logs (files that may fail), durable (files that survive a kill)
a run of steps      run/ (trainer, metrics, faults), checkpoint/, pretrain (the entry point), entry (how a command ends),
                    interrupt (SIGINT while it imports), launch (torchrun without its traceback)
beside runs         cost/ (what a step would take on a cluster), tools/ (plans, data, conversion, reports), evaluation/, generation
after it            post/ (fine-tuning and RLHF, on models of transformers)
"""
