#!/usr/bin/env bash
# GPT-1.3B with GPT-3's hyper-parameters: 1M tokens per batch, 100B in total.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/gpt3/pretrain_gpt_1p3b.sh [more flags]    other settings: see launch.sh
set -euo pipefail
LAYERS=24 HIDDEN=2048 HEADS=16
TP=1 PP=1 # data parallelism only
LR=2e-4 MIN_LR=2e-5
MICRO_BATCH=4 BATCH_TOKENS=$((1 << 20))
TOKENS=100000000000
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
