#!/usr/bin/env bash
# PPO at O0 and at O3 with the same task and seed, and a CSV row for each: reward, memory of weights and states, speed.
#
#   MODEL=smollm2 REWARD=arithmetic bash examples/rlhf/run.sh [more flags of examples/rlhf/ppo.py]
# Without MODEL: a tiny random model learns to write digits, on a CPU in a minute. The same command resumes an interrupted run.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/preamble.sh
OUT=${OUT:-runs/rlhf}
LEVELS=${LEVELS:-O0 O3}
interpreter
if [[ -z ${MODEL:-} ]]; then
  MODEL=$OUT/toy REWARD=${REWARD:-digits}
  mkdir -p "$OUT"
  [ -f "$MODEL/tokenizer.json" ] || "$PYTHON" examples/toy_chat.py "$MODEL"
  set -- --lr 3e-3 --max-new-tokens 8 --kl-coef 0.02 --train-iters 16 --log-interval 4 "$@"
fi
REWARD=${REWARD:-arithmetic}

for level in $LEVELS; do
  echo "$level"
  [ -d "$OUT/$level/model" ] ||
    PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" examples/rlhf/ppo.py --load "$MODEL" --reward "$REWARD" --save "$OUT/$level" \
      --opt-level "$level" --rows "$OUT/rows.csv" "$@"
done
