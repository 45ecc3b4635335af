#!/usr/bin/env bash
# GPT-125M (12 layers, hidden 768, 12 heads, sequence 2048) on cleaned English Wikipedia text (enwik8, 15.5M GPT-2 tokens):
# 1,500 steps of 16k tokens on 1, 2, 4 or 8 GPUs. It trains one level; run it once per level to compare them.
#
#   OPT_LEVEL=O2 SEED=1234 bash examples/gpt3_125m_enwik8.sh [more flags of msamp pretrain]
# TOY=1 trains a small model on the same text for 20 steps, also on a CPU; the full size requires a GPU or ON_CPU=1.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/preamble.sh
OPT_LEVEL=${OPT_LEVEL:-O2}
SEED=${SEED:-1234}
DATA=${DATA:-data/enwik8}
OUT=${OUT:-runs/gpt3_125m_enwik8/${OPT_LEVEL}_seed${SEED}}
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
whole GPUS_PER_NODE 1 8
((8 % GPUS_PER_NODE == 0)) || refuse "GPUS_PER_NODE=$GPUS_PER_NODE does not divide the 8 sequences of a step: give 1, 2, 4 or 8"
whole SEED 0 2147483647
TOY=${TOY:-0}
whole TOY 0 1
interpreter
((TOY)) || gpu "TOY=1 trains a small model in a minute"
toy=()
((!TOY)) || toy=(--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --train-iters 20 --lr-warmup-iters 2 --eval-iters 1)

[ -f "$DATA/meta.json" ] || "$PYTHON" -m megatron.lm.tools.prepare_text enwik8 --out "$DATA"

exec "$PYTHON" -m megatron.lm.shell.torchrun --standalone --nproc-per-node "$GPUS_PER_NODE" -m megatron.lm.pretrain \
  --preset 125m --opt-level "$OPT_LEVEL" --fp8-min-gain 0 --seed "$SEED" \
  --micro-batch-size $((8 / GPUS_PER_NODE)) --global-batch-size 8 --train-iters 1500 \
  --lr 6e-4 --min-lr 6e-5 --lr-warmup-iters 150 --lr-decay-style cosine \
  --train-data-path "$DATA/train_text_document" --valid-data-path "$DATA/valid_text_document" \
  --tokenizer-type GPT2BPETokenizer --vocab-file "$DATA/encoder.json" --merge-file "$DATA/vocab.bpe" \
  --eval-interval 250 --eval-iters 40 --log-interval 10 --metrics-file "$OUT/metrics.jsonl" \
  --record-precision "$OUT/precision.jsonl" --record-interval 250 ${toy[@]+"${toy[@]}"} "$@"
