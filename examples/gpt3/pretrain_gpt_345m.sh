#!/usr/bin/env bash
# GPT-345M: GPT-2's medium shape with GPT-3's learning rate and batch of that size, 0.5M tokens; 100B in total.
#   DATA=corpus_text_document OPT_LEVEL=O3 bash examples/gpt3/pretrain_gpt_345m.sh [more flags]    other settings: see launch.sh
set -euo pipefail
LAYERS=24 HIDDEN=1024 HEADS=16
TP=1 PP=1 # data parallelism only
LR=3e-4 MIN_LR=3e-5
MICRO_BATCH=8 BATCH_TOKENS=$((1 << 19))
TOKENS=100000000000
NNODES=${NNODES:-1}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
