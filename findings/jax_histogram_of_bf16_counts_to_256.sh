#!/bin/bash
# jnp.histogram of BF16 numbers counts to 256 per bin: of a million numbers in ten bins it finds 2,310, and their shape is flat.
#
# Seen with jax 0.10.2 on a CPU, Linux x86-64. Its counts have the dtype of the data and are added up one by one; NumPy returns integers. 256 + 1 is 256 in
# BF16, so that every bin with more looks like every other: gradients or activations of a BF16 model, drawn or logged this way, seem evenly spread, and
# density=True divides by the wrong total. FP16 stops at 2,048. The documentation says "counts". Nothing is reported, and no issue about it was found.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${JAX:-jax==0.10.2}" ml_dtypes==0.6.0 numpy==2.4.6
cat > histogram.py <<'PROGRAM'
import jax
import jax.numpy as jnp

drawn = jax.random.normal(jax.random.key(0), (1000000,))
for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
    counts, _ = jnp.histogram(drawn.astype(dtype))
    density, edges = jnp.histogram(drawn.astype(dtype), bins=8, range=(-4, 4), density=True)
    shape = [round(float(x), 2) for x in density]
    counts = counts.astype(int)
    print(f"{jnp.dtype(dtype).name}: {counts.tolist()}, in sum {counts.sum()}; density from -4 to 4 {shape}")
PROGRAM
venv/bin/python -W ignore histogram.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: [116, 2317, 26516, 134833, 311422, 328514, 158411, 34320, 3417, 134], in sum 1000000; density from -4 to 4 [0.0, 0.02, 0.14, 0.34, 0.34, 0.14, 0.02, 0.0]
float16: [116, 2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048, 135], in sum 16635; density from -4 to 4 [0.09, 0.14, 0.14, 0.14, 0.14, 0.14, 0.14, 0.09]
bfloat16: [111, 256, 256, 256, 256, 256, 256, 256, 256, 151], in sum 2310; density from -4 to 4 [0.12, 0.12, 0.12, 0.12, 0.12, 0.12, 0.12, 0.12]
EXPECTED
