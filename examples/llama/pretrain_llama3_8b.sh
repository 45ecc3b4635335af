#!/usr/bin/env bash
# Llama-3-8B: shape, sequence and learning rate as published; 4M tokens per batch, 100B in total, on 64 GPUs.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/llama/pretrain_llama3_8b.sh [more flags]    other settings: see ../gpt3/launch.sh
set -euo pipefail
LAYERS=32 HIDDEN=4096 HEADS=32 FFN=14336 KV_HEADS=8 VOCABULARY=128256 SEQUENCE=8192
MODEL=(
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --rotary-base 5e5
)
TP=1 PP=1 # data parallelism only; O0 on 80 GB needs --tensor-model-parallel-size 2 --sequence-parallel
LR=3e-4 MIN_LR=3e-5
MICRO_BATCH=1 BATCH_TOKENS=$((4 << 20))
TOKENS=100000000000
NNODES=${NNODES:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../gpt3/launch.sh"
