#!/usr/bin/env bash
# Qwen3-30B-A3B: shape as published, learning rate of Llama-3-8B; 4M tokens per batch, 100B in total, on 64 GPUs in 4 pipeline stages.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/moe/pretrain_qwen3_30b_a3b.sh [more flags]    other settings: see ../gpt3/launch.sh
set -euo pipefail
LAYERS=48 HIDDEN=2048 HEADS=32 FFN=6144 KV_HEADS=4 VOCABULARY=151936 SEQUENCE=4096
MODEL=(
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --rotary-base 1e6 --norm-epsilon 1e-6
  --kv-channels 128 --qk-layernorm --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-aux-loss-coeff 0.001
)
TP=1 PP=4
LR=3e-4 MIN_LR=3e-5
MICRO_BATCH=1 BATCH_TOKENS=$((4 << 20))
TOKENS=100000000000
NNODES=${NNODES:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../gpt3/launch.sh"
