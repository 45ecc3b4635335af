#!/usr/bin/env bash
# Train under Slurm to the last iteration, across as many time limits as needed. From the root of the checkout:
#
#   DATA=corpus_text_document SAVE=checkpoints sbatch examples/slurm/pretrain.sh examples/gpt3/pretrain_gpt_7b.sh --save-interval 500
#
# The first argument is a launch script; flags of the trainer may follow. Options of sbatch override the lines below. Variables besides
# those of examples/gpt3/launch.sh:
#
#   SAVE      folder of the checkpoints, shared by all machines; the run resumes from it, and so does the same command after the job
#   ATTEMPTS  how often training starts within one allocation if a process fails (default 3)
#   REQUEUES  how often the job may start again, whatever the reason, without a newer checkpoint (default 100); counted in SAVE/slurm_restarts
#   ROOT      the checkout (default: the folder of submission)
#   IMAGE     container of the tasks: FILE.sif for Apptainer, anything else for Pyxis (srun --container-image); sees ROOT, SAVE and DATA's folder
# Check GPUs and links beforehand with DCGM and nccl-tests (docs/guide/clusters.md). Slurm sends SIGUSR1 ten minutes before the limit, and
# SIGTERM if it preempts the job: every process saves and exits, and the job is requeued. Allow more time than a step and a save take.
#SBATCH --job-name=pretrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

ROOT=${ROOT:-${SLURM_SUBMIT_DIR:-$PWD}} # Slurm runs a copy of this file
if [ ! -f "$ROOT/examples/preamble.sh" ]; then
  echo "error: ROOT=$ROOT is not a checkout of this repository: submit from its root folder, or set ROOT" >&2
  exit 2
fi
# shellcheck source=examples/preamble.sh
source "$ROOT/examples/preamble.sh"
[ -n "${SLURM_JOB_ID:-}" ] || refuse "this is not a Slurm job: start it with sbatch"
[ -n "${SAVE:-}" ] || refuse "SAVE is not set: set it to the folder for checkpoints, which all machines share"
[ -f "${1:-}" ] || refuse "the first argument, '${1:-}', is not a file: give a launch script, such as examples/gpt3/pretrain_gpt_7b.sh"
SCRIPT=$1
shift
ATTEMPTS=${ATTEMPTS:-3} REQUEUES=${REQUEUES:-100}
whole ATTEMPTS 1 1000
whole REQUEUES 0 10000
export PYTHON OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun no longer takes it from the job by itself
if [ -n "${IMAGE:-}" ]; then PYTHON=python3; else interpreter; fi # the image's own
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#HOSTS[@]})) || refuse "scontrol does not list the hosts of this job"
export MASTER_ADDR=${HOSTS[0]}

PREEMPTED='PreemptTime=[0-9]' # Slurm takes the machines for another job, at the end of the partition's GraceTime
UNFINISHED=75 # exit code of the trainer if it stops before its last iteration
leaving=0 ending=0 interrupted=0

# shellcheck disable=SC2329  # the trap calls it
leave() {
  leaving=1 interrupted=1
  echo "received SIGUSR1, the time limit is near: the processes save and exit"
  scancel --signal=TERM "$SLURM_JOB_ID" || true # signals the steps, not this script
}
trap leave USR1
trap 'ending=1 interrupted=1' TERM # Slurm ends the job, and sends it to the tasks too, which save; the script waits for them

# shown PATTERN: whether Slurm's record of this job contains it.
shown() {
  scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep -q "$1"
}

# step COMMAND...: run it as a step with one task per GPU; return its exit code. Once a task has ended, the others have five minutes.
step() {
  local pid code
  srun --kill-on-bad-exit=0 --wait=300 "${INTO[@]}" "$@" &
  pid=$!
  while :; do
    code=0 interrupted=0
    wait "$pid" || code=$?
    ((interrupted)) || return "$code" # otherwise the trap ended the wait
  done
}

# saved: print the iteration of the newest checkpoint.
saved() {
  cat "$SAVE/latest_checkpointed_iteration.txt" 2>/dev/null || echo none
}

requeue() {
  if [ "$(saved)" = "$before" ] && ! shown "$PREEMPTED"; then
    refuse "no checkpoint was written before the job had to leave (newest: $before): give sbatch a longer --time, or an earlier --signal"
  fi
  echo "requeued; the newest checkpoint is of iteration $(saved)"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}

INTO=() # flags of srun, or a command, that start a task in the container
if [ -n "${IMAGE:-}" ]; then
  folders=("$ROOT" "$(realpath -m "$SAVE")" "$(realpath -m "$(dirname "${DATA:-$ROOT}")")")
  mounts=$(printf '%s\n' "${folders[@]}" | sed 's/.*/&:&/' | paste -sd,)
  INTO=("--container-image=$IMAGE" "--container-workdir=$PWD" "--container-mounts=$mounts")
  if [[ $IMAGE == *.sif ]]; then INTO=(apptainer exec --nv --pwd "$PWD" --bind "$(IFS=, && echo "${folders[*]}")" "$IMAGE"); fi
fi
before=$(saved)
# The file: the job, its newest checkpoint, and the restarts when that was first seen.
restarts=${SLURM_RESTART_COUNT:-0} file=$SAVE/slurm_restarts
last=$(cat "$file" 2>/dev/null || true)
if [ "${last% *}" != "$SLURM_JOB_ID $before" ]; then
  last="$SLURM_JOB_ID $before $restarts"
  mkdir -p "$SAVE"
  echo "$last" >"$file"
fi
if ((restarts - ${last##* } > REQUEUES)); then
  refuse "the job started again more than $REQUEUES times (REQUEUES) without a newer checkpoint than $before: see why above, then submit it again"
fi
for ((attempt = 1; attempt <= ATTEMPTS; attempt++)); do
  # Another port each time, since one may be taken; below 32768, from which Linux gives ports to connections.
  export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 16 + attempt) % 12000))
  code=0
  step bash "$SCRIPT" --save "$SAVE" --load "$SAVE" --exit-code-unfinished "$UNFINISHED" "$@" || code=$?
  if ((code == 0)); then
    echo "training is finished"
    exit 0
  fi
  if ((code == 2)); then exit 2; fi # invalid flags
  # What Slurm ends it also requeues: preempted without a GraceTime, with a failed machine, not after scancel. Only its time limit is ours.
  if ((!ending)) || shown Reason=TimeLimit; then
    # A crash while the job may be preempted is one: the tasks save, or the signal ends them.
    if ((leaving)) || { ((code == UNFINISHED || code > 128)) && shown "$PREEMPTED"; }; then requeue; fi
  fi
  # Do not restart after a stop for another reason (--exit-duration-in-mins).
  if ((ending || code == UNFINISHED)); then
    exit "$code"
  fi
  echo "attempt $attempt of $ATTEMPTS ended with exit code $code; the newest checkpoint is of iteration $(saved)" >&2
done
exit "$code"
