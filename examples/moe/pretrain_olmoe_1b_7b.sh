#!/usr/bin/env bash
# OLMoE-1B-7B: shape, learning rate and losses of the router as published; 4M tokens per batch, 100B in total, on 8 GPUs.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/moe/pretrain_olmoe_1b_7b.sh [more flags]    other settings: see ../gpt3/launch.sh
set -euo pipefail
LAYERS=16 HIDDEN=2048 HEADS=16 FFN=1024 VOCABULARY=50304 SEQUENCE=4096
MODEL=(
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --rotary-base 1e4
  --qk-layernorm --qk-layernorm-scope projection --num-experts 64 --moe-router-topk 8 --moe-router-pre-softmax
  --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001
)
TP=1 PP=1 # data parallelism only
LR=4e-4 MIN_LR=4e-5
MICRO_BATCH=1 BATCH_TOKENS=$((4 << 20))
TOKENS=100000000000
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/../gpt3/launch.sh"
