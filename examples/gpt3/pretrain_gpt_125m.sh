#!/usr/bin/env bash
# GPT-125M of FP8-LM, Table 1: 1M tokens per batch, 100B in total.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/gpt3/pretrain_gpt_125m.sh [more flags]    other settings: see launch.sh
set -euo pipefail
LAYERS=12 HIDDEN=768 HEADS=12
TP=1 PP=1 # data parallelism only
LR=6e-4 MIN_LR=6e-5
MICRO_BATCH=8 BATCH_TOKENS=$((1 << 20))
TOKENS=100000000000
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
