# shellcheck shell=bash
# Sourced by the launch scripts: what they check of their environment before anything starts. A refusal is a line, and exit code 2.

refuse() {
  echo "error: $*" >&2
  exit 2
}

# whole NAME LEAST MOST: the variable must be a whole number between the two.
whole() {
  local value=${!1}
  if [[ ! $value =~ ^[0-9]{1,9}$ ]] || ((10#$value < $2 || 10#$value > $3)); then
    refuse "$1=$value: give a whole number in [$2, $3]"
  fi
  printf -v "$1" %d "$((10#$value))" # 08 is no number in arithmetic
}

# PYTHON, where it is not given: that of the checkout's own environment, which `make venv` and `make quickstart` make, else python3.
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi

# gpu WHAT: without a GPU a training of full size is refused; WHAT says how to run a small one. ON_CPU=1 trains all the same.
gpu() {
  ON_CPU=${ON_CPU:-0}
  whole ON_CPU 0 1
  if ((ON_CPU)); then return; fi
  if [ -n "${CUDA_VISIBLE_DEVICES-all}" ] && { compgen -G "/dev/nvidia[0-9]*" || [ -e /dev/dxg ] || nvidia-smi -L; } >/dev/null 2>&1; then return; fi
  refuse "no GPU is visible here, and a CPU, which emulates FP8, takes hours to days for this training: $1; ON_CPU=1 starts it all the same"
}

# interpreter: PYTHON must be one, and must have what the trainer imports.
interpreter() {
  command -v "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON is no program: name the interpreter of the environment with torch and megatron-core"
  "$PYTHON" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("torch") is None or find_spec("megatron.core") is None)' \
    >/dev/null 2>&1 || refuse "PYTHON=$PYTHON lacks torch or megatron-core (it is $(type -P "$PYTHON")): run 'make venv', install them there" \
    "(pip install -e .), or name another interpreter"
}
