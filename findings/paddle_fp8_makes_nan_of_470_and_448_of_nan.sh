#!/bin/bash
# Paddle's cast to float8_e4m3fn on a CPU makes NaN of 464.01 to 479.9, 448 of everything above, and 448 of NaN itself.
#
# Seen with paddlepaddle 3.3.1 (CPU) on Linux x86-64, from FP32, BF16 and FP16. A careful engineer expects saturation, as on NVIDIA's GPUs, or NaN
# above 464, as in ml_dtypes; here a number that overflows by 5 % is NaN and one that overflows a millionfold is finite. A NaN among gradients or
# weights is gone: it returns as 448 times the scale, and a check for NaN behind the cast passes. Infinity is 448, too. E5M2 keeps NaN, and saturates.
# Nothing is reported, and the page of paddle.cast names no rule. In the header that defines the type, the path for GPUs converts by CUDA's own
# function.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute and 1 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${PADDLE:-paddlepaddle==3.3.1}" numpy==2.4.6
cat > casts.py <<'PROGRAM'
import paddle

values = [448.0, 464.0, 466.0, 478.0, 480.0, 1e9, float("inf"), float("nan"), -470.0, -float("nan")]
print(values)
for source in ("float32", "bfloat16", "float16"):
    for target in ("float8_e4m3fn", "float8_e5m2"):
        x = paddle.to_tensor(values, dtype="float32").cast(source)
        print(f"{source} to {target}: {x.cast(target).cast('float32').tolist()}")
PROGRAM
venv/bin/python -W ignore casts.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
[448.0, 464.0, 466.0, 478.0, 480.0, 1000000000.0, inf, nan, -470.0, nan]
float32 to float8_e4m3fn: [448.0, 448.0, nan, nan, 448.0, 448.0, 448.0, 448.0, nan, -448.0]
float32 to float8_e5m2: [448.0, 448.0, 448.0, 448.0, 512.0, 57344.0, 57344.0, nan, -448.0, nan]
bfloat16 to float8_e4m3fn: [448.0, 448.0, nan, nan, 448.0, 448.0, 448.0, 448.0, nan, 448.0]
bfloat16 to float8_e5m2: [448.0, 448.0, 448.0, 448.0, 512.0, 57344.0, 57344.0, nan, -448.0, nan]
float16 to float8_e4m3fn: [448.0, 448.0, nan, nan, 448.0, 448.0, 448.0, 448.0, nan, -448.0]
float16 to float8_e5m2: [448.0, 448.0, 448.0, 448.0, 512.0, 57344.0, 57344.0, nan, -448.0, nan]
EXPECTED
