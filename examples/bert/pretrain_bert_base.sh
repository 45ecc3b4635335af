#!/usr/bin/env bash
# BERT-base with masked language modeling in BERT's two phases: 128 tokens, then 512 with the same position embedding.
#   DATA=data/enwik8/train_text_document VALID=data/enwik8/valid_text_document PRECISION=collage-plus bash examples/bert/pretrain_bert_base.sh
# PRECISION is any recipe of --precision, so BF16, Collage's options and FP8 differ in one flag. TOY=1 trains a small model on a CPU.
# Rerun after an interruption: a finished phase is skipped, an unfinished one resumes from its newest checkpoint.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/preamble.sh
PRECISION=${PRECISION:-bf16}
SEED=${SEED:-1234}
DATA=${DATA:-data/enwik8/train_text_document}
VALID=${VALID:-${DATA/train/valid}}
OUT=${OUT:-runs/bert_base/${PRECISION}_seed${SEED}}
GPUS_PER_NODE=${GPUS_PER_NODE:-1}
STEPS_1=${STEPS_1:-2000} STEPS_2=${STEPS_2:-500}
BATCH_1=${BATCH_1:-256} BATCH_2=${BATCH_2:-64} # sequences: 32k tokens per step in both
TOY=${TOY:-0}
whole GPUS_PER_NODE 1 8
whole SEED 0 2147483647
whole STEPS_1 1 100000000
whole STEPS_2 0 100000000
whole BATCH_1 1 1000000
whole BATCH_2 1 1000000
whole TOY 0 1
for name in BATCH_1 BATCH_2; do
  ((${!name} % GPUS_PER_NODE == 0)) || refuse "$name=${!name} is not divisible by GPUS_PER_NODE=$GPUS_PER_NODE: give a multiple"
done
interpreter
((TOY)) || gpu "TOY=1 trains a small model"

shape=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --attention-dropout 0.1 --hidden-dropout 0.1)
[ "$TOY" = 0 ] || shape=(--num-layers 2 --hidden-size 64 --num-attention-heads 2)
tokenizer=(--tokenizer-type GPT2BPETokenizer --vocab-file "$(dirname "$DATA")/encoder.json" --merge-file "$(dirname "$DATA")/vocab.bpe")
[ -z "${TOKENIZER:-}" ] || tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")

# phase NAME LENGTH BATCH STEPS LR [more flags]
phase() {
  local name=$1 length=$2 batch=$3 steps=$4 lr=$5
  shift 5
  local saved=$OUT/$name warm_up=$((steps / 10))
  local load=("$@")
  if [ -f "$saved/latest_checkpointed_iteration.txt" ]; then
    if [ "$(cat "$saved/latest_checkpointed_iteration.txt")" -ge "$steps" ]; then
      echo "$name is finished: $saved"
      return
    fi
    load=(--load "$saved")
  fi
  "$PYTHON" -m megatron.lm.shell.torchrun --standalone --nproc-per-node "$GPUS_PER_NODE" -m megatron.lm.pretrain \
    --objective masked-lm --mask-whole-words --position-embedding-type learned_absolute --max-position-embeddings 512 \
    "${shape[@]}" --precision "$PRECISION" --seed "$SEED" --seq-length "$length" --adam-beta1 0.9 --adam-beta2 0.999 --weight-decay 0.01 \
    --micro-batch-size $((batch / GPUS_PER_NODE)) --global-batch-size "$batch" --train-iters "$steps" \
    --lr "$lr" --min-lr 0 --lr-warmup-iters "$warm_up" --lr-decay-style linear \
    --train-data-path "$DATA" --valid-data-path "$VALID" "${tokenizer[@]}" --eval-interval $((steps / 4 + 1)) --eval-iters 2 \
    --log-interval 10 --save "$saved" --save-interval $((steps / 4 + 1)) --keep-last 2 --metrics-file "$saved.jsonl" "${load[@]}" "${flags[@]}"
}

flags=("$@")
phase phase1 128 "$BATCH_1" "$STEPS_1" 4e-4
[ "$STEPS_2" = 0 ] || phase phase2 512 "$BATCH_2" "$STEPS_2" 2e-4 --load "$OUT/phase1" --finetune
