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

# interpreter: PYTHON must be one, and must have what the trainer imports.
interpreter() {
  command -v "$PYTHON" >/dev/null || refuse "PYTHON=$PYTHON is no program: name the interpreter of the environment with torch and megatron-core"
  "$PYTHON" -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("torch") is None or find_spec("megatron.core") is None)' \
    >/dev/null 2>&1 || refuse "PYTHON=$PYTHON lacks torch or megatron-core: install them there (pip install -e .), or name another interpreter"
}
