#!/bin/bash
# mlx.core.load reads FP8 (E4M3) and E8M0 tensors of a safetensors file as uint8: 1.0 is 56 and -1.0 is 184, and nn.Module takes them as weights.
#
# Seen with mlx 0.32.4 (CPU), safetensors 0.8.0 and torch 2.13.0 on Linux x86-64. mlx has no FP8 dtype, and refuses F8_E5M2 and other dtypes that it
# does not have; of F8_E4M3 and F8_E8M0 it returns the codes. load_weights(strict=True) looks at names and shapes only, so that a model computes with
# integers from 0 to 255 in place of numbers around 0, and save_weights writes them as U8. Nothing is reported, and the page of mlx.core.load does not
# name it. Right: mlx.core.from_fp8 on each such tensor, after a look at the file's header. (mlx-lm does so for the models that it knows.)
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${MLX:-mlx[cpu]==0.32.4}" safetensors==0.8.0 numpy==2.4.6
cat > weights.py <<'PROGRAM'
import mlx.core as mx
import torch
from mlx import nn
from safetensors.torch import save_file

mx.set_default_device(mx.cpu)
weight = torch.tensor([[1.0, -1.0, 0.25, 0.0]])
for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
    stored = weight.abs().clamp(min=0.25) if dtype == torch.float8_e8m0fnu else weight
    save_file({"weight": stored.to(dtype)}, "model.safetensors")
    try:
        read = mx.load("model.safetensors")["weight"]
    except RuntimeError as refused:
        print(f"{str(dtype)[6:]}: refused, {refused}")
        continue
    layer = nn.Linear(4, 1, bias=False)
    layer.load_weights("model.safetensors", strict=True)
    output = layer(mx.array([[1.0, 1.0, 1.0, 1.0]]))
    print(f"{str(dtype)[6:]}: {stored[0].tolist()} is read as {read[0].tolist()}, {str(read.dtype)[9:]}; their sum by nn.Linear is {output.item()}")
PROGRAM
venv/bin/python -W ignore weights.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
bfloat16: [1.0, -1.0, 0.25, 0.0] is read as [1.0, -1.0, 0.25, 0.0], bfloat16; their sum by nn.Linear is 0.25
float8_e4m3fn: [1.0, -1.0, 0.25, 0.0] is read as [56, 184, 40, 0], uint8; their sum by nn.Linear is 280.0
float8_e5m2: refused, [safetensor] unsupported dtype F8_E5M2
float8_e8m0fnu: [1.0, 1.0, 0.25, 0.25] is read as [127, 127, 125, 125], uint8; their sum by nn.Linear is 504.0
EXPECTED
