#!/bin/bash
# mlx on a CPU adds up a quantized layer in BF16: 14,336 inputs at 4 bits are 13 % off, at 8 bits as well, and 4,096 ones sum to 256.
#
# Seen with mlx 0.32.4 (CPU) on Linux x86-64: mx.quantized_matmul, and nn.QuantizedLinear, which calls it. The same weights dequantized and multiplied by
# `@` in BF16 are right to 0.2 %, since that adds in FP32, as mlx's kernels for Apple's GPUs do. With "affine" the whole row is summed in the dtype of the
# inputs; "mxfp8" and "nvfp4" add their blocks in it, and are 2 to 4 % off. FP16 is 8 times better. Whoever compares 8 bits with 4, or with BF16, on a
# CPU measures these sums. Nothing is reported, and the page does not name it. softmax is the same unless it is given `precise` (documented), which
# quantized_matmul does not have; cumsum and scatter stop at 256, too. Pull request 3909 is about plain sums; no issue about this one was found.
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
drawn = np.random.default_rng(0)
ones = mx.ones((1, 4096), dtype=mx.bfloat16)
layer = nn.Linear(4096, 64, bias=False)
layer.weight = mx.ones((64, 4096), dtype=mx.bfloat16)
print("sum of 4,096 ones in BF16: linear", layer(ones)[0, 0].item(), "quantized to 4 bits", nn.QuantizedLinear.from_linear(layer)(ones)[0, 0].item())


def error(y, right):
    return float(mx.linalg.norm(y.astype(mx.float32) - right) / mx.linalg.norm(right))


for inputs in (1024, 4096, 14336):
    weight, x = (mx.array(drawn.normal(size=(64, inputs)).astype(np.float32)) for _ in range(2))
    for mode, bits in (("affine", 4), ("affine", 8), ("mxfp8", 8), ("nvfp4", 4)):
        quantized = mx.quantize(weight.astype(mx.bfloat16), bits=bits, mode=mode)
        dequantized = mx.dequantize(*quantized, bits=bits, mode=mode).astype(mx.bfloat16)
        x16 = x.astype(mx.bfloat16)
        right = x16.astype(mx.float32) @ mx.dequantize(*quantized, bits=bits, mode=mode).astype(mx.float32).T
        seen = error(mx.quantized_matmul(x16, *quantized, bits=bits, mode=mode), right), error(x16 @ dequantized.T, right)
        print(f"{inputs} inputs, {mode}, {bits} bits: quantized_matmul is {100 * seen[0]:.0f} % off, matmul of the dequantized weights {100 * seen[1]:.0f} %")
PROGRAM
venv/bin/python -W ignore layers.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
sum of 4,096 ones in BF16: linear 4096.0 quantized to 4 bits 256.0
1024 inputs, affine, 4 bits: quantized_matmul is 3 % off, matmul of the dequantized weights 0 %
1024 inputs, affine, 8 bits: quantized_matmul is 4 % off, matmul of the dequantized weights 0 %
1024 inputs, mxfp8, 8 bits: quantized_matmul is 1 % off, matmul of the dequantized weights 0 %
1024 inputs, nvfp4, 4 bits: quantized_matmul is 1 % off, matmul of the dequantized weights 0 %
4096 inputs, affine, 4 bits: quantized_matmul is 7 % off, matmul of the dequantized weights 0 %
4096 inputs, affine, 8 bits: quantized_matmul is 7 % off, matmul of the dequantized weights 0 %
4096 inputs, mxfp8, 8 bits: quantized_matmul is 2 % off, matmul of the dequantized weights 0 %
4096 inputs, nvfp4, 4 bits: quantized_matmul is 2 % off, matmul of the dequantized weights 0 %
14336 inputs, affine, 4 bits: quantized_matmul is 13 % off, matmul of the dequantized weights 0 %
14336 inputs, affine, 8 bits: quantized_matmul is 13 % off, matmul of the dequantized weights 0 %
14336 inputs, mxfp8, 8 bits: quantized_matmul is 3 % off, matmul of the dequantized weights 0 %
14336 inputs, nvfp4, 4 bits: quantized_matmul is 3 % off, matmul of the dequantized weights 0 %
EXPECTED
