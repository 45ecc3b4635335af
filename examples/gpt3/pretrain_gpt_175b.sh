#!/usr/bin/env bash
# GPT-175B of FP8-LM, Table 1: 1M tokens per batch, 40B in total; 128 GPUs as in its Table 5.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/gpt3/pretrain_gpt_175b.sh [more flags]    other settings: see launch.sh
set -euo pipefail
LAYERS=96 HIDDEN=12288 HEADS=96
TP=8 PP=4 # with sequence parallelism
LR=3e-5 MIN_LR=3e-6
MICRO_BATCH=1 BATCH_TOKENS=$((1 << 20))
TOKENS=40000000000
NNODES=${NNODES:-16}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
