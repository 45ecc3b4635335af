#!/usr/bin/env bash
# Fine-tune one model at O0 to O3 with the same data, order and seed, and write a CSV row for each: loss, memory, throughput.
#
#   MODEL=smollm2 DATA=instructions.jsonl bash examples/sft/run.sh [more flags of examples/sft/train.py]
# Without MODEL and DATA: a tiny random model learns sums, on a CPU in a minute. The same command resumes an interrupted run.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/preamble.sh
OUT=${OUT:-runs/sft}
LEVELS=${LEVELS:-O0 O1 O2 O3}
interpreter
if [[ -z ${MODEL:-} && -z ${DATA:-} ]]; then
  MODEL=$OUT/toy DATA=$OUT/sums.jsonl
  mkdir -p "$OUT"
  [ -f "$MODEL/tokenizer.json" ] || "$PYTHON" examples/toy_chat.py "$MODEL"
  for a in 1 2 3 4 5 6 7 8; do
    for b in 1 2 3 4 5 6 7 8; do echo "{\"instruction\": \"$a+$b=\", \"output\": \"it is $((a + b))\"}"; done
  done >"$DATA"
  set -- --dtype fp32 --seq-length 128 --lr 3e-3 --train-iters 30 --valid-rows 8 "$@"
fi
[[ -n ${MODEL:-} && -n ${DATA:-} ]] || refuse "MODEL=${MODEL:-}, DATA=${DATA:-}: set both or neither"

for level in $LEVELS; do
  echo "$level"
  [ -d "$OUT/$level/model" ] ||
    PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" examples/sft/train.py --load "$MODEL" --data "$DATA" --save "$OUT/$level" \
      --opt-level "$level" --rows "$OUT/rows.csv" "$@"
done
