#!/usr/bin/env bash
# Llama-2-7B: shape, sequence and learning rate as published; 4M tokens per batch, 100B in total, on 32 GPUs.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/llama/pretrain_llama2_7b.sh [more flags]    other settings: see ../gpt3/launch.sh
set -euo pipefail
LAYERS=32 HIDDEN=4096 HEADS=32 FFN=11008 KV_HEADS=32 VOCABULARY=32000 SEQUENCE=4096
MODEL=(
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
)
TP=1 PP=1 # data parallelism only
LR=3e-4 MIN_LR=3e-5
MICRO_BATCH=1 BATCH_TOKENS=$((4 << 20))
TOKENS=100000000000
NNODES=${NNODES:-4}
source "$(dirname "${BASH_SOURCE[0]}")/../gpt3/launch.sh"
