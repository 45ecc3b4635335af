# shellcheck shell=bash
# Sourced by the scripts of this folder, of ../llama and of ../moe, each of which sets the numbers of one model size; starts msamp pretrain
# with them. A script may also set SEQUENCE (default 2048), FFN, KV_HEADS, MODEL (other flags of the model) and VOCABULARY (size of the
# published tokenizer, for DRY_RUN=1).
#
#   OPT_LEVEL       O0, O1, O2, O3 (default O3)
#   DATA            a folder made by msamp prepare-text, or the prefix of a dataset made by msamp preprocess
#   TOKENIZER       folder with encoder.json and vocab.bpe, or tokenizer.json (default: the folder of the data)
#   GPUS_PER_NODE   processes per machine (default 8)
#   NNODES          machines (default: the script's); without Slurm, start it on each with NODE_RANK, MASTER_ADDR and MASTER_PORT
#   DRY_RUN=1       print the grid, and parameters and bytes per process; exit with 2 if they do not fit
#   GPU_MEMORY_GIB  memory limit of DRY_RUN=1 (default: this machine's GPU, else an H100's 79)
#   TOY=1           the same grid and flags on a few CPU processes: a small model, three steps, generated data
#   ON_CPU=1        train at full size without a GPU, which takes days
#   PYTHON          interpreter (default: .venv of the checkout, else python3)
# Under srun: one task per GPU or one task per machine; MASTER_ADDR is then the first host of the job. Flags of
# msamp pretrain may follow and override those below: bash pretrain_gpt_13b.sh --save checkpoints --save-interval 500

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=examples/preamble.sh
source "$ROOT/examples/preamble.sh"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
SEQUENCE=${SEQUENCE:-2048}
TOY=${TOY:-0} DRY_RUN=${DRY_RUN:-0}
whole TOY 0 1
whole DRY_RUN 0 1
whole GPUS_PER_NODE 1 1024
whole NNODES 1 65536
interpreter

FLAGS=(
  --opt-level "${OPT_LEVEL:-O3}" --use-distributed-optimizer
  --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS" --seq-length "$SEQUENCE"
  --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
  --micro-batch-size "$MICRO_BATCH" --global-batch-size $((BATCH_TOKENS / SEQUENCE))
  --train-iters $(((TOKENS + BATCH_TOKENS / 2) / BATCH_TOKENS))
  ${MODEL[@]+"${MODEL[@]}"}
  --lr "$LR" --min-lr "$MIN_LR" --lr-warmup-iters 1000 --lr-decay-style cosine
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
)
if ((${FFN:-0})); then
  FLAGS+=(--ffn-hidden-size "$FFN")
fi
if ((${KV_HEADS:-HEADS} < HEADS)); then
  FLAGS+=(--group-query-attention --num-query-groups "$KV_HEADS")
fi
if ((TP > 1)); then
  # Unlike Megatron-LM's scripts without CUDA_DEVICE_MAX_CONNECTIONS=1: gradients are reduced on a separate stream, and with one
  # connection it waits for the others (GPT-1.3B, O3, TP 2 x DP 2, H200: 368 ms/step, with 8 connections 315).
  FLAGS+=(--sequence-parallel)
fi

toy() {
  ((TP * PP <= 4)) || refuse "TOY=1 supports at most 4 processes on this CPU, but TP $TP x PP $PP is $((TP * PP)): use DRY_RUN=1"
  NNODES=1 GPUS_PER_NODE=$((TP * PP))
  unset SLURM_STEP_ID
  export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
  FLAGS+=(
    --num-layers $((2 * PP)) --hidden-size 64 --num-attention-heads 4 --seq-length 32 --make-vocab-size-divisible-by 32
    --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr-warmup-iters 1 --eval-iters 0 --log-interval 1
    --tokenizer-type NullTokenizer --vocab-size 60
  )
  if ((${FFN:-0})); then FLAGS+=(--ffn-hidden-size 128); fi
  if ((${KV_HEADS:-HEADS} < HEADS)); then FLAGS+=(--num-query-groups 4); fi
  if ((DRY_RUN)); then return; fi
  folder=$(mktemp -d 2>/dev/null) || refuse "cannot create a folder for the toy data: set TMPDIR to a writable folder with free space"
  trap 'rm -rf "$folder"' EXIT
  awk 'BEGIN { for (d = 1; d <= 100; d++) { for (i = 0; i < 40; i++) printf "%d ", d * i % 59; print "\n<|endoftext|>" } }' >"$folder/toy.txt"
  "$PYTHON" -m megatron.lm.tools.preprocess_data --input "$folder/toy.txt" --output-prefix "$folder/toy" \
    --tokenizer-type NullTokenizer --vocab-size 60 --append-eod >"$folder/log" 2>&1 || refuse "cannot create the toy data: $(cat "$folder/log")"
  FLAGS+=(--train-data-path "$folder/toy_text_document")
}

data() {
  local tokenizer
  if [ -z "${DATA:-}" ]; then
    refuse "DATA is not set: give DATA=FOLDER made by 'msamp prepare-text enwik8 --out FOLDER', or DATA=PREFIX made by" \
      "'msamp preprocess'; TOY=1 and DRY_RUN=1 require no data"
  elif [ -f "$DATA/train_text_document.bin" ]; then
    FLAGS+=(--train-data-path "$DATA/train_text_document" --valid-data-path "$DATA/valid_text_document")
    tokenizer=${TOKENIZER:-$DATA}
  elif [ -f "$DATA.bin" ]; then
    FLAGS+=(--data-path "$DATA")
    tokenizer=${TOKENIZER:-$(dirname "$DATA")}
  else
    refuse "DATA=$DATA: neither $DATA/train_text_document.bin nor $DATA.bin exists; give a folder made by msamp prepare-text, or" \
      "a prefix made by msamp preprocess"
  fi
  if [ -f "$tokenizer/encoder.json" ]; then
    FLAGS+=(--tokenizer-type GPT2BPETokenizer --vocab-file "$tokenizer/encoder.json" --merge-file "$tokenizer/vocab.bpe")
  elif [ -f "$tokenizer/tokenizer.json" ]; then
    FLAGS+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer/tokenizer.json")
  fi # else --tokenizer-type is among the flags that follow, or is refused as missing
}

# One task per GPU: each task is a process of the run. One task per machine, or none: torchrun starts the processes of this machine.
launch() {
  local tasks=1
  if [ -n "${SLURM_STEP_ID:-}" ]; then
    # The step may have fewer machines than the job.
    tasks=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-}} NNODES=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-}} NODE_RANK=${SLURM_NODEID:-}
    whole tasks 1 9999999
    whole NNODES 1 65536
    whole NODE_RANK 0 $((NNODES - 1))
    local hosts # not through `head`: a pipe that it closes early ends the script
    hosts=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}" 2>/dev/null) || [ -n "${MASTER_ADDR:-}" ] ||
      refuse "scontrol does not list the hosts of this job: set MASTER_ADDR to the host name of its first machine"
    MASTER_ADDR=${MASTER_ADDR:-${hosts%%$'\n'*}}
    MASTER_PORT=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 12000))}
    export MASTER_ADDR MASTER_PORT
  fi
  if ((tasks > NNODES)); then
    RANK=${SLURM_PROCID:-} WORLD_SIZE=$tasks LOCAL_RANK=${SLURM_LOCALID:-}
    whole RANK 0 $((tasks - 1))
    whole LOCAL_RANK 0 $((tasks - 1))
    export RANK WORLD_SIZE LOCAL_RANK
    COMMAND=("$PYTHON" -m megatron.lm.pretrain)
  elif ((NNODES == 1)); then
    COMMAND=("$PYTHON" -m megatron.lm.shell.torchrun --standalone --nproc-per-node "$GPUS_PER_NODE" -m megatron.lm.pretrain)
  elif [ -z "${MASTER_ADDR:-}" ] || [ -z "${NODE_RANK:-}" ]; then
    refuse "NNODES=$NNODES, but MASTER_ADDR or NODE_RANK is not set: start this with srun, or on each machine with MASTER_ADDR=HOST and" \
      "NODE_RANK=0 to $((NNODES - 1)); set NNODES=1 for one machine"
  else
    whole NODE_RANK 0 $((NNODES - 1))
    MASTER_PORT=${MASTER_PORT:-29500}
    whole MASTER_PORT 1 65535
    COMMAND=("$PYTHON" -m megatron.lm.shell.torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE"
      --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m megatron.lm.pretrain)
  fi
}

if ((TOY)); then
  toy
elif ((!DRY_RUN)); then
  gpu "TOY=1 trains a small model in a minute"
  data
fi
if ((DRY_RUN)); then
  FLAGS+=(--dry-run ${GPU_MEMORY_GIB:+--device-memory-gib "$GPU_MEMORY_GIB"})
  if ((!TOY && ${VOCABULARY:-0})); then FLAGS+=(--vocab-size "$VOCABULARY"); fi
  export WORLD_SIZE=$((GPUS_PER_NODE * NNODES))
  COMMAND=("$PYTHON" -m megatron.lm.pretrain)
else
  launch
fi
COMMAND+=("${FLAGS[@]}" "$@")
if ((TOY)); then
  "${COMMAND[@]}" # no exec: this shell removes the data afterwards
else
  exec "${COMMAND[@]}"
fi
