#!/usr/bin/env bash
# Mixtral-8x7B: shape as published, learning rate of Llama-3-8B; 4M tokens per batch, 100B in total, on 64 GPUs in 8 pipeline stages.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/moe/pretrain_mixtral_8x7b.sh [more flags]    other settings: see ../gpt3/launch.sh
set -euo pipefail
LAYERS=32 HIDDEN=4096 HEADS=32 FFN=14336 KV_HEADS=8 VOCABULARY=32000 SEQUENCE=4096
MODEL=(
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --rotary-base 1e6
  --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.02
)
TP=1 PP=8
LR=3e-4 MIN_LR=3e-5
MICRO_BATCH=1 BATCH_TOKENS=$((4 << 20))
TOKENS=100000000000
NNODES=${NNODES:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../gpt3/launch.sh"
