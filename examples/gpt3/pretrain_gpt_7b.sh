#!/usr/bin/env bash
# GPT-7B of FP8-LM, Table 1: 4M tokens per batch, 100B in total; 32 GPUs as in its Table 5.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/gpt3/pretrain_gpt_7b.sh [more flags]    other settings: see launch.sh
set -euo pipefail
LAYERS=32 HIDDEN=4096 HEADS=32
TP=1 PP=1 # data parallelism only
LR=3e-4 MIN_LR=3e-5
MICRO_BATCH=2 BATCH_TOKENS=$((4 << 20))
TOKENS=100000000000
NNODES=${NNODES:-4}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
