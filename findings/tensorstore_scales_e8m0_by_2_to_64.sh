#!/bin/bash
# tensorstore's casts to and from float8_e8m0fnu are off by 2^64: 1.0 becomes 2^-64, and a scale of 2 read as float32 is -3.7e19.
#
# Seen with tensorstore 0.1.86 and ml_dtypes 0.6.0 on Linux x86-64, from and to float32, bfloat16 and float64, in ts.cast of arrays and of stores.
# The code of a power e is e + 63 where E8M0 (OCP MX) has e + 127, and on the way back codes from 128 on, scales of 2 and more, get a sign, which
# the format does not have. Both casts together give back some of the numbers, so that a round trip hides it. Codes that are stored as
# float8_e8m0fnu and read without a cast are right. Nothing is reported: MX scales that are read so make every block wrong.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TENSORSTORE:-tensorstore==0.1.86}" ml_dtypes==0.6.0 numpy==2.4.6
cat > scales.py <<'PROGRAM'
import ml_dtypes
import numpy as np
import tensorstore as ts

values = np.array([0.25, 0.5, 1, 2, 4, 256], np.float32)
right = values.astype(ml_dtypes.float8_e8m0fnu)
print("codes of", values.tolist(), "in ml_dtypes:", right.view(np.uint8).tolist())
for dtype in (ts.float32, ts.bfloat16, ts.float64):
    given = values.astype(dtype.numpy_dtype)
    codes = ts.cast(ts.array(given), ts.float8_e8m0fnu).read().result().view(np.uint8)
    back = ts.cast(ts.array(right), dtype).read().result().astype(np.float64)
    print(f"{dtype.name}: ts.cast writes codes {codes.tolist()}, and reads the right ones as {[float(f'{x:.2g}') for x in back]}")
PROGRAM
venv/bin/python -W ignore scales.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
codes of [0.25, 0.5, 1.0, 2.0, 4.0, 256.0] in ml_dtypes: [125, 126, 127, 128, 129, 135]
float32: ts.cast writes codes [61, 62, 63, 64, 65, 71], and reads the right ones as [4.6e+18, 9.2e+18, 1.8e+19, -3.7e+19, -7.4e+19, -4.7e+21]
bfloat16: ts.cast writes codes [61, 62, 63, 64, 65, 71], and reads the right ones as [4.6e+18, 9.2e+18, 1.8e+19, -3.7e+19, -7.4e+19, -4.7e+21]
float64: ts.cast writes codes [61, 62, 63, 64, 65, 71], and reads the right ones as [4.6e+18, 9.2e+18, 1.8e+19, -3.7e+19, -7.4e+19, -4.7e+21]
EXPECTED
