#!/bin/bash
# ExecuTorch's LayerNorm of BF16 or FP16 rows of 256 numbers and more takes a wrong mean and variance: outputs are 40 to 150 % off.
#
# Seen with executorch 1.5.1 and torch 2.13.0 on a CPU, Linux x86-64: layer_norm of normal numbers, exported, lowered and run by the runtime in the wheel.
# Rows of up to 255 numbers, and FP32 at any width, are right. Wider rows are read as if each pair of numbers were one in FP32: 0, 1, 0, 1, ... in BF16 is
# taken for a row of ones of variance 0, and comes out as -316 and 0. BF16 passes for plausible, 1.4 times too large, since the upper half of an FP32 number
# is one in BF16; FP16 does not. A transformer has such rows everywhere, and nothing is reported. Pull request 16727 (merged in January 2026) made these
# kernels add in FP32; no issue about wrong results was found. Besides, var, avg_pool2d and convolutions add in BF16; sum, mean and softmax do not
# (pull request 20090).
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${EXECUTORCH:-executorch==1.5.1}" torchao==0.18.0 numpy==2.4.6
cat > norm.py <<'PROGRAM'
import logging

import torch
from executorch.exir import to_edge
from executorch.runtime import Runtime
from torch.nn import functional as F

logging.disable(logging.ERROR)


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def run(function, *inputs):
    program = to_edge(torch.export.export(Model(function), inputs)).to_executorch()
    return Runtime.get().load_program(program.buffer).load_method("forward").execute(list(inputs))[0].float()


seen = open("seen", "w")
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for width in (128, 255, 256, 768, 4096):
        x = torch.randn(8, width).to(dtype)
        right = F.layer_norm(x.float(), (width,))
        error = (run(lambda x: F.layer_norm(x, x.shape[-1:]), x) - right).norm() / right.norm()
        print(f"{dtype} layer_norm of rows of {width}:", "right to 0.5 %" if error < 0.005 else f"more than {30 if error > 0.3 else 0.5} % off", file=seen)
ones = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16)
row = (torch.arange(4096) % 2).bfloat16()[None]
print("layer_norm of 0, 1, 0, 1, ...:", run(lambda x: F.layer_norm(x, x.shape[-1:]), row)[0, :4].tolist(), file=seen)
print("variance of them:", run(lambda x: x.var(-1), row).item(), file=seen)
print("mean of 4,096 ones by avg_pool2d:", run(lambda x: F.avg_pool2d(x, 64), ones).item(), file=seen)
print("their sum by conv2d:", run(lambda x, y: F.conv2d(x, y), ones, ones).item(), file=seen)
print("by sum:", run(lambda x: x.sum(), ones).item(), file=seen)
PROGRAM
venv/bin/python -W ignore norm.py > log 2>&1 || { cat log; exit 1; }
cat seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
torch.float32 layer_norm of rows of 128: right to 0.5 %
torch.float32 layer_norm of rows of 255: right to 0.5 %
torch.float32 layer_norm of rows of 256: right to 0.5 %
torch.float32 layer_norm of rows of 768: right to 0.5 %
torch.float32 layer_norm of rows of 4096: right to 0.5 %
torch.bfloat16 layer_norm of rows of 128: right to 0.5 %
torch.bfloat16 layer_norm of rows of 255: right to 0.5 %
torch.bfloat16 layer_norm of rows of 256: more than 30 % off
torch.bfloat16 layer_norm of rows of 768: more than 30 % off
torch.bfloat16 layer_norm of rows of 4096: more than 30 % off
torch.float16 layer_norm of rows of 128: right to 0.5 %
torch.float16 layer_norm of rows of 255: right to 0.5 %
torch.float16 layer_norm of rows of 256: more than 30 % off
torch.float16 layer_norm of rows of 768: more than 30 % off
torch.float16 layer_norm of rows of 4096: more than 30 % off
layer_norm of 0, 1, 0, 1, ...: [-316.0, 0.0, -316.0, 0.0]
variance of them: 0.0625
mean of 4,096 ones by avg_pool2d: 0.0625
their sum by conv2d: 256.0
by sum: 4096.0
EXPECTED
