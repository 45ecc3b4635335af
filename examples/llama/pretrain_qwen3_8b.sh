#!/usr/bin/env bash
# Qwen3-8B: shape and sequence as published, learning rate of Llama-3-8B; 4M tokens per batch, 100B in total, on 64 GPUs.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/llama/pretrain_qwen3_8b.sh [more flags]    other settings: see ../gpt3/launch.sh
set -euo pipefail
LAYERS=36 HIDDEN=4096 HEADS=32 FFN=12288 KV_HEADS=8 VOCABULARY=151936 SEQUENCE=4096
MODEL=(
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --rotary-base 1e6 --norm-epsilon 1e-6 --qk-layernorm
)
TP=1 PP=1 # data parallelism only
LR=3e-4 MIN_LR=3e-5
MICRO_BATCH=1 BATCH_TOKENS=$((4 << 20))
TOKENS=100000000000
NNODES=${NNODES:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../gpt3/launch.sh"
