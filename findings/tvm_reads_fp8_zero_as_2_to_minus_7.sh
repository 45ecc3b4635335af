#!/bin/bash
# Apache TVM on a CPU reads E4M3's zero as 2^-7, and writes -15 for a million and 1.5 for NaN: its FP8 casts know only normal numbers.
#
# Seen with apache-tvm 0.27.0.post1, ml_dtypes 0.6.0 and numpy 2.4.6 on Linux x86-64, target "llvm", kernels of one cast. Exponent and mantissa are
# moved to where FP32 has them and the bias is added, whatever they are. So 0 is read as if it had a leading 1, as 2^-7 in E4M3 and 2^-15 in E5M2; the
# smallest subnormal number is 4.5 and 2.5 times what it is; E4M3's NaN is 480, and E5M2's infinity 65,536. On the way to FP8 subnormal numbers become
# 0, and what is too large wraps around: 500 is -0, infinity 1. FP8 weights with zeros (padded, pruned or small) are read as numbers that were not
# there. Casts of BF16 and FP16 are right. A cast to BF16 or FP8 and back within one kernel is removed, one to FP16 is not. Nothing is reported.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TVM:-apache-tvm==0.27.0.post1}" ml_dtypes==0.6.0 numpy==2.4.6
cat > casts.py <<'PROGRAM'
import ml_dtypes
import numpy as np
import tvm
from tvm import te


def cast(x: np.ndarray, *dtypes: str) -> np.ndarray:
    """Cast `x`, of the first dtype, to the others one after the other, in one kernel."""
    first = last = te.placeholder(x.shape, dtypes[0], name="x")
    for dtype in dtypes[1:]:
        last = te.compute(x.shape, lambda i: last[i].astype(dtype))
    kernel = tvm.compile(te.create_prim_func([first, last]), target="llvm")
    out = tvm.runtime.empty(x.shape, dtypes[-1])
    kernel(tvm.runtime.tensor(x), out)
    return out.numpy()


def differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != b) & ~(np.isnan(a) & np.isnan(b))


np.seterr(all="ignore")
for name in ("float8_e4m3fn", "float8_e5m2"):
    dtype = getattr(ml_dtypes, name)
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    want, found = codes.astype(np.float32), cast(codes, name, "float32")
    wrong = differ(found, want)
    print(f"{name} to float32: {wrong.sum()} of 256 codes differ: {', '.join(f'{a:g} is {b:g}' for a, b in list(zip(want, found))[:3])}")
    x = np.array([0.3, 0.0, 448, 500, 1e6, np.inf, np.nan, 2.0**-9, 2.0**-16], np.float32)
    want, found = x.astype(dtype).astype(np.float32), cast(x, "float32", name).astype(np.float32)
    print(f"float32 to {name}: {', '.join(f'{a:g} is {b:g} (ml_dtypes: {c:g})' for a, b, c in zip(x, found, want))}")
for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float8_e4m3fn", ml_dtypes.float8_e4m3fn)):
    x = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    rounded = differ(cast(x, "float32", name).astype(np.float32), x.astype(dtype).astype(np.float32)).sum()
    kept = (cast(x, "float32", name, "float32") == x).sum()
    print(f"{name}, 10,000 normal numbers: {rounded} cast wrongly; cast and back in one kernel, {kept} are as before")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore casts.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float8_e4m3fn to float32: 18 of 256 codes differ: 0 is 0.0078125, 0.00195312 is 0.00878906, 0.00390625 is 0.00976562
float32 to float8_e4m3fn: 0.3 is 0.3125 (ml_dtypes: 0.3125), 0 is 0 (ml_dtypes: 0), 448 is 448 (ml_dtypes: 448), 500 is -0 (ml_dtypes: nan), 1e+06 is -15 (ml_dtypes: nan), inf is 1 (ml_dtypes: nan), nan is 1.5 (ml_dtypes: nan), 0.00195312 is 0 (ml_dtypes: 0.00195312), 1.52588e-05 is 0 (ml_dtypes: 0)
float8_e5m2 to float32: 16 of 256 codes differ: 0 is 3.05176e-05, 1.52588e-05 is 3.8147e-05, 3.05176e-05 is 4.57764e-05
float32 to float8_e5m2: 0.3 is 0.3125 (ml_dtypes: 0.3125), 0 is 0 (ml_dtypes: 0), 448 is 448 (ml_dtypes: 448), 500 is 512 (ml_dtypes: 512), 1e+06 is -0.000244141 (ml_dtypes: inf), inf is 1 (ml_dtypes: inf), nan is 1.5 (ml_dtypes: nan), 0.00195312 is 0.00195312 (ml_dtypes: 0.00195312), 1.52588e-05 is 0 (ml_dtypes: 1.52588e-05)
bfloat16, 10,000 normal numbers: 0 cast wrongly; cast and back in one kernel, 10000 are as before
float16, 10,000 normal numbers: 0 cast wrongly; cast and back in one kernel, 0 are as before
float8_e4m3fn, 10,000 normal numbers: 83 cast wrongly; cast and back in one kernel, 10000 are as before
EXPECTED
