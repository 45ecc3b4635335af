#!/bin/bash
# Paddle's Tensor.tolist() and numpy() of BF16 and FP8 return the bits as integers: [1.0, -2.0] is [16256, 49152] in BF16 and [56, -64] in E4M3.
#
# Seen with paddlepaddle 3.3.1 (CPU) on Linux x86-64. The page of numpy() says that the array's "dtype is same as current Tensor", that of tolist() "a
# list that contain the same value". The arrays are uint16 and int8, so that a mean over losses, a plot of gradients or an export by NumPy is made of
# codes, without a message; numpy.asarray(x) of a scalar loss of 1.5 is 16320. float(x), x.item() and printing are right for BF16, which hides it.
# paddle.to_tensor of the array is an integer tensor. Right: x.cast("float32") first.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute and 1 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${PADDLE:-paddlepaddle==3.3.1}" numpy==2.4.6
cat > lists.py <<'PROGRAM'
import numpy as np
import paddle

for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
    x = paddle.to_tensor([1.0, -2.0]).cast(dtype)
    array = x.numpy()
    print(f"{dtype}: tolist {x.tolist()}, numpy {array.tolist()} of {array.dtype}, mean by NumPy {np.asarray(x).mean()}", end="")
    print(f", float(x[0]) {float(x[0])}" if "float8" not in dtype else "")
PROGRAM
venv/bin/python -W ignore lists.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: tolist [1.0, -2.0], numpy [1.0, -2.0] of float32, mean by NumPy -0.5, float(x[0]) 1.0
float16: tolist [1.0, -2.0], numpy [1.0, -2.0] of float16, mean by NumPy -0.5, float(x[0]) 1.0
bfloat16: tolist [16256, 49152], numpy [16256, 49152] of uint16, mean by NumPy 32704.0, float(x[0]) 1.0
float8_e4m3fn: tolist [56, -64], numpy [56, -64] of int8, mean by NumPy -4.0
float8_e5m2: tolist [60, -64], numpy [60, -64] of int8, mean by NumPy -2.0
EXPECTED
