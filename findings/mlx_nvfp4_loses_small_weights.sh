#!/bin/bash
# mlx's nvfp4 layers make zeros of every block of 16 weights below 0.0059: a layer of deviation 0.001 is gone whole, without a message.
#
# Seen with mlx 0.32.4 (CPU) on Linux x86-64: nn.quantize(mode="nvfp4"), and mx.quantize at its defaults. NVFP4 has an E4M3 scale per 16 weights and an
# FP32 scale per tensor, which lifts the former into E4M3's range. mlx leaves the latter out unless it is given to mx.quantize as global_scale; nn.quantize
# and mx.quantized_matmul have no such argument. E4M3 ends at 2^-9, half of it rounds to 0, and a weight is 6 times its scale at most. A deviation of
# 0.006, common in large models, costs a third more error, weights above 2,688 are clipped, and mxfp4 and affine keep any size. The page names the scale's
# type and the argument, not the consequence; pull request 3022 names zero scales, and mlx-lm's 1836 is about models that repeat one token for it. torchao
# and auto-round's nv_fp4 use the FP32 scale by default.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs half a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${MLX:-mlx[cpu]==0.32.4}" numpy==2.4.6
cat > layers.py <<'PROGRAM'
import mlx.core as mx
import numpy as np
from mlx import nn

mx.set_default_device(mx.cpu)
drawn = mx.array(np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32))
for deviation in (1.0, 0.02, 0.006, 0.003, 0.001):
    weight = drawn * deviation
    seen = []
    for mode in ("affine", "mxfp4", "nvfp4"):
        model = nn.Sequential(nn.Linear(1024, 256, bias=False))
        model.layers[0].weight = weight
        nn.quantize(model, bits=4, mode=mode)
        layer = model.layers[0]
        biases = [layer.biases] if mode == "affine" else []
        back = mx.dequantize(layer.weight, layer.scales, *biases, group_size=layer.group_size, bits=4, mode=mode)
        error = float(mx.linalg.norm(back - weight) / mx.linalg.norm(weight))
        seen.append(f"{mode} {100 * error:.0f} % off, {100 * float((back == 0).mean()):.0f} % zeros")
    print(f"deviation {deviation}:", "; ".join(seen))
PROGRAM
venv/bin/python -W ignore layers.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
deviation 1.0: affine 9 % off, 12 % zeros; mxfp4 12 % off, 11 % zeros; nvfp4 10 % off, 7 % zeros
deviation 0.02: affine 9 % off, 12 % zeros; mxfp4 12 % off, 11 % zeros; nvfp4 10 % off, 7 % zeros
deviation 0.006: affine 9 % off, 12 % zeros; mxfp4 12 % off, 12 % zeros; nvfp4 13 % off, 7 % zeros
deviation 0.003: affine 9 % off, 12 % zeros; mxfp4 12 % off, 12 % zeros; nvfp4 58 % off, 50 % zeros
deviation 0.001: affine 9 % off, 12 % zeros; mxfp4 12 % off, 11 % zeros; nvfp4 100 % off, 100 % zeros
EXPECTED
