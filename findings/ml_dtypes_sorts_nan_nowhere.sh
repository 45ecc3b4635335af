#!/bin/bash
# numpy.sort of an ml_dtypes array (BF16, FP8) that holds a NaN leaves the other values unsorted; of FP16 and FP32 it moves the NaN to the end.
#
# Seen with numpy 2.4.6 and ml_dtypes 0.6.0 on Linux x86-64. NumPy's page says that NaN sorts behind every number. For these dtypes the NaN
# stays in place as a wall between two sorted parts, in sort, argsort, partition and unique; the 0.9 quantile, which is NaN for FP16 and
# FP32, is a number, and the first of the sorted values is not the smallest. Nothing is reported. One NaN among a million values is enough.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${ML_DTYPES:-ml_dtypes==0.6.0}" "${NUMPY:-numpy==2.4.6}"
cat > sorted.py <<'PROGRAM'
import ml_dtypes
import numpy as np

drawn = np.random.default_rng(0).normal(size=1001)
drawn[500] = np.nan
for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    short, long = np.array([3, np.nan, 1, 2], dtype), drawn.astype(dtype)
    x = np.sort(long)
    first, last = "first is" if x[0] == np.nanmin(long) else "first is not", "last is" if np.isnan(x[-1]) else "last is not"
    quantile = "NaN" if np.isnan(np.quantile(long, 0.9)) else "a number"
    short = np.sort(short).astype(float).tolist()
    print(f"{long.dtype}: {short}; of 1,001 the {first} the smallest, the {last} NaN, the 0.9 quantile is {quantile}")
PROGRAM
venv/bin/python -W ignore sorted.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: [1.0, 2.0, 3.0, nan]; of 1,001 the first is the smallest, the last is NaN, the 0.9 quantile is NaN
float16: [1.0, 2.0, 3.0, nan]; of 1,001 the first is the smallest, the last is NaN, the 0.9 quantile is NaN
bfloat16: [3.0, nan, 1.0, 2.0]; of 1,001 the first is not the smallest, the last is not NaN, the 0.9 quantile is a number
float8_e4m3fn: [3.0, nan, 1.0, 2.0]; of 1,001 the first is not the smallest, the last is not NaN, the 0.9 quantile is a number
float8_e5m2: [3.0, nan, 1.0, 2.0]; of 1,001 the first is not the smallest, the last is not NaN, the 0.9 quantile is a number
EXPECTED
