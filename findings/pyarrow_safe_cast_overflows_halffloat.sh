#!/bin/bash
# pyarrow's safe cast makes inf of 70,000 and 2,048 of 2,049 where the target is halffloat; casts of integers to float and double are refused.
#
# Seen with pyarrow 26.0.1 on Linux x86-64. `safe` (the default) is documented as "check for overflows or other unsafe conversions", and it
# refuses an integer that FP32 or FP64 does not hold. For halffloat nothing is checked, neither in Array.cast nor in Table.cast nor in pa.array
# of a Python int. A column of lengths or token ids in halffloat loses its values without a message. (A double beyond FP32 becomes inf, too.)
#
# Exit code 0: as described; 1: the behaviour has changed. It needs half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${PYARROW:-pyarrow==26.0.1}"
cat > casts.py <<'PROGRAM'
import pyarrow as pa


def tried(cast) -> object:
    try:
        return cast()[0].as_py()
    except pa.ArrowInvalid:
        return "refused"


for value, target in ((2**53 + 1, pa.float64()), (2**24 + 1, pa.float32()), (2**11 + 1, pa.float16()), (70_000, pa.float16())):
    x = pa.array([value], pa.int64())
    schema = pa.schema([("x", target)])
    found = tried(lambda: x.cast(target, safe=True)), tried(lambda: pa.table({"x": x}).cast(schema, safe=True)["x"])
    print(f"{value} to {target}: Array.cast {found[0]}, Table.cast {found[1]}, pa.array {tried(lambda: pa.array([value], target))}")
PROGRAM
venv/bin/python -W ignore casts.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
9007199254740993 to double: Array.cast refused, Table.cast refused, pa.array refused
16777217 to float: Array.cast refused, Table.cast refused, pa.array refused
2049 to halffloat: Array.cast 2048.0, Table.cast 2048.0, pa.array 2048.0
70000 to halffloat: Array.cast inf, Table.cast inf, pa.array inf
EXPECTED
