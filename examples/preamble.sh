# shellcheck shell=bash
# Sourced by the launch scripts: checks of the environment before anything starts. A refusal prints one line and exits with 2.

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
  printf -v "$1" %d "$((10#$value))" # bash arithmetic rejects 08
}

# Default of PYTHON: the interpreter of the checkout's environment, created by `make venv` or `make quickstart`, else python3.
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi

# gpu WHAT: refuse full-size training without a GPU; WHAT names the way to run a small model. ON_CPU=1 trains anyway.
gpu() {
  ON_CPU=${ON_CPU:-0}
  whole ON_CPU 0 1
  if ((ON_CPU)); then return; fi
  if [ -n "${CUDA_VISIBLE_DEVICES-all}" ] && { compgen -G "/dev/nvidia[0-9]*" || [ -e /dev/dxg ] || nvidia-smi -L; } >/dev/null 2>&1; then return; fi
  refuse "no GPU is visible, and this training takes hours to days on a CPU, which emulates FP8: $1; ON_CPU=1 trains anyway"
}

# interpreter: PYTHON must be a Python interpreter that can import torch and megatron-core.
interpreter() {
  command -v "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON is not a program: set it to the interpreter of the environment with torch and megatron-core"
  "$PYTHON" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("torch") is None or find_spec("megatron.core") is None)' \
    >/dev/null 2>&1 || refuse "PYTHON=$PYTHON cannot import torch and megatron-core (it is $(type -P "$PYTHON")): run 'make venv', install" \
    "them there (pip install -e .), or set PYTHON to another interpreter"
}
