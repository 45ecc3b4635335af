"""Flags of the optimizer, the schedules, the batches, the length of the run, and recomputation."""

from megatron.lm.config.megatron_flags.topics.row import accepted, dropped, refused, translated

OFFLOAD = "optimizer states stay on the GPU: shard them with --use-distributed-optimizer, or use --opt-level O3, whose states are FP8"
ADAM = "AdamW is the only optimizer here: use --optimizer adam"
CONSTANT = "weight decay is constant here: give --weight-decay alone"
RESTART = "in-process restart is not supported: start the job again with the same --load and --save, and it resumes"
RL = "this command only pre-trains: use examples/rlhf for DPO and PPO"
SFT = "this command only pre-trains: use examples/sft to fine-tune"

FLAGS = (
    *accepted(
        "--yaml-cfg FILE",
        "--lr X",
        "--min-lr X",
        "--lr-warmup-iters N",
        "--lr-warmup-samples N",
        "--lr-warmup-fraction X",
        "--lr-warmup-init X",
        "--lr-decay-iters N",
        "--lr-decay-samples N",
        "--lr-decay-style TEXT",
        "--lr-wsd-decay-style TEXT",
        "--lr-wsd-decay-iters N",
        "--lr-wsd-decay-samples N",
        "--decoupled-lr X",
        "--decoupled-min-lr X",
        "--weight-decay X",
        "--adam-beta1 X",
        "--adam-beta2 X",
        "--adam-eps X",
        "--clip-grad X",
        "--micro-batch-size N",
        "--global-batch-size N",
        "--rampup-batch-size N N N",
        "--train-iters N",
        "--train-samples N",
        "--seed N",
        "--eval-interval N",
        "--eval-iters N",
        "--exit-interval N",
        "--exit-duration-in-mins X",
        "--check-weight-hash-across-dp-replicas-interval N",
        "--recompute-granularity TEXT",
        "--recompute-modules TEXT...",
        "--recompute-method TEXT",
        "--recompute-num-layers N",
    ),
    *translated("--recompute-granularity selective", "--recompute-activations", "--checkpoint-activations"),
    *translated("--deterministic", "--deterministic-mode"),
    *translated("--cuda-graph none", "--cuda-graph-impl none"),
    *translated("--weight-decay X", "--start-weight-decay X", "--end-weight-decay X"),
    *dropped("it is the trainer's optimizer: AdamW, with --adam-beta1, --adam-beta2, --adam-eps", "--optimizer adam"),
    *dropped("weight decay is constant here", "--weight-decay-incr-style constant"),
    *dropped(
        "the step is replayed as CUDA graphs wherever that is possible (--cuda-graph)",
        "--enable-cuda-graph",
        "--external-cuda-graph",
        "--cuda-graph-impl TEXT",
        "--cuda-graph-scope TEXT...",
        "--cuda-graph-warmup-steps N",
    ),
    *dropped(
        "a step with a non-finite loss or gradient is always skipped, and the log names the tensor where it began",
        "--check-for-nan-in-loss-and-grad",
        "--no-check-for-nan-in-loss-and-grad",
        "--rerun-mode TEXT",
    ),
    *dropped("every token counts, so the mean over micro-batches is the mean over tokens", "--calculate-per-token-loss"),
    *dropped("SIGTERM always saves a checkpoint and ends the run", "--exit-signal-handler", "--exit-signal SIGTERM", "--exit-signal 15"),
    *dropped("data-loading workers end with the run", "--exit-signal-handler-for-dataloader"),
    *dropped(
        "a step leaves no reference cycles, so Python's garbage collector has no pauses to align across ranks",
        "--manual-gc",
        "--manual-gc-interval N",
        "--no-manual-gc-eval",
        "--disable-manual-gc-eval",
    ),
    *dropped(
        "steps reuse the memory that PyTorch caches: against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and on "
        "several GPUs NCCL_GRAPH_REGISTER=0",
        "--empty-unused-memory-level N",
    ),
    *dropped("it enables checks of Megatron-LM that this trainer does not have", "--test-mode"),
    *dropped(
        "after each step the host reads the loss of the step before, so it is never more than one step ahead of the GPU",
        "--train-sync-interval N",
    ),
    *dropped("it applies to --optimizer sgd, and the optimizer is AdamW", "--sgd-momentum X"),
    *dropped(
        "it belongs to a tool of NVIDIA's own clusters",
        "--no-one-logger",
        "--one-logger-*",
        "--app-tag-run-name TEXT",
        "--app-tag-run-version TEXT",
    ),
    *dropped("MSC is not used here", "--disable-msc"),
    *refused("the batch grows in equal steps here: give --rampup-batch-size START INCREMENT SAMPLES", "--step-batch-size-schedule TEXT"),
    *refused(
        "the batch size must be divisible: choose a --global-batch-size for the number of processes", "--decrease-batch-size-if-needed"
    ),
    *refused(
        "training has a single data phase: start one run per phase, with --load of the previous one", "--phase-transition-iterations TEXT"
    ),
    *refused(CONSTANT, "--weight-decay-incr-style TEXT"),
    *refused("norms have no weight decay: drop it", "--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type TEXT"),
    *refused(ADAM, "--optimizer TEXT", "--muon-*"),
    *refused(
        OFFLOAD,
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction X",
        "--use-torch-optimizer-for-cpu-offload",
        "--overlap-cpu-optimizer-d2h-h2d",
        "--no-pin-cpu-grads",
        "--no-pin-cpu-params",
    ),
    *refused(
        "activations stay on the GPU: use --recompute-granularity, or --save-activations coat",
        "--cpu-offloading-num-layers N",
        "--fine-grained-activation-offloading",
        "--offload-modules TEXT...",
        "--min-offloaded-tensor-size N",
    ),
    *refused("each rank keeps all of its saved activations: use --sequence-parallel, which splits them", "--distribute-saved-activations"),
    *refused("this command always trains: use `python -m megatron.lm.tools.evaluate`", "--skip-train"),
    *refused("evaluation reads --eval-iters batches: give as many as the validation data has", "--full-validation"),
    *refused("validation sets are one blend: run `python -m megatron.lm.tools.evaluate` for each", "--multiple-validation-sets"),
    *refused(
        "use --max-skipped-steps and --loss-spike-threshold, which skip the data of a spike with --loss-spike-action rollback",
        "--iterations-to-skip N...",
        "--check-for-large-grads",
        "--check-for-spiky-loss",
        "--result-rejected-tracker-filename FILE",
    ),
    *refused("inject faults with `python -m tools.soak`", "--error-injection-rate N", "--error-injection-type TEXT"),
    *refused("the trainer handles only SIGTERM: let the batch system send it", "--exit-signal TEXT"),
    *refused("it is the former name of --micro-batch-size: use that", "--batch-size N"),
    *refused("it is the former name of --lr-warmup-iters: use that", "--warmup X"),
    *refused(
        RESTART, "--inprocess-*", "--enable-ft-package", "--calc-ft-timeouts", "--ft-*", "--adlr-autoresume", "--adlr-autoresume-interval N"
    ),
    *refused(RL, "--perform-rl-step", "--rl-*", "--no-rl-*", "--grpo-*", "--langrl-*", "--no-langrl-*", "--refit-method TEXT"),
    *refused(SFT, "--sft", "--sft-tokenizer-prompt-format TEXT"),
    *refused(
        "this command only trains: use `python -m megatron.lm.tools.generate`",
        "--inference-*",
        "--no-inference-*",
        "--max-tokens-to-oom N",
        "--use-legacy-static-engine",
        "--decode-only-cuda-graphs",
        "--nccl-all-reduce-for-prefill",
        "--enable-chunked-prefill",
        "--disable-chunked-prefill",
        "--mlp-chunks-for-prefill N",
        "--symmetric-ar-type TEXT",
    ),
    *refused("training/optimizer.py defines the parameter groups: drop it", "--dump-param-to-param-group-map FILE"),
)
