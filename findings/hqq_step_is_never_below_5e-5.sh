#!/bin/bash
# HQQ quantizes in steps of at least 5e-5, whatever the weights: 8 bits are no better than 4 for a deviation of 1e-4, and 1e-5 is lost whole.
#
# Seen with hqq 0.2.8.post1 and torch 2.13.0 on a CPU, Linux x86-64, BaseQuantizeConfig at its defaults with groups of 64, FP32, BF16 and FP16 alike.
# Scales are clamped to 2e4 ("to avoid half-precision problems", says a comment in the source), which does not depend on the dtype, and is reached at
# 8 bits by groups whose range is below 0.0128, a deviation of 2.7e-3. Projections that started at zero and were trained briefly can be of that size,
# and lose most of their bits. Nothing is reported, and README and docstrings name no limit.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${HQQ:-hqq==0.2.8.post1}" numpy==2.4.6
cat > errors.py <<'PROGRAM'
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for deviation in (2e-2, 1e-3, 1e-4, 1e-5):
        errors = []
        for bits in (8, 4):
            layer = torch.nn.Linear(256, 256, bias=False)
            weight = (torch.randn(256, 256) * deviation).to(dtype)
            layer.weight = torch.nn.Parameter(weight)
            options = {"compute_dtype": dtype, "device": "cpu", "del_orig": False}
            read = HQQLinear(layer, BaseQuantizeConfig(nbits=bits, group_size=64), **options).dequantize()
            errors.append(f"{bits} bits {float((read.float() - weight.float()).norm() / weight.float().norm()):.0%}")
        print(f"{str(dtype)[6:]}, weights of deviation {deviation:.0e}: error of " + ", ".join(errors))
PROGRAM
venv/bin/python -W ignore errors.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32, weights of deviation 2e-02: error of 8 bits 1%, 4 bits 9%
float32, weights of deviation 1e-03: error of 8 bits 1%, 4 bits 9%
float32, weights of deviation 1e-04: error of 8 bits 14%, 4 bits 14%
float32, weights of deviation 1e-05: error of 8 bits 99%, 4 bits 99%
bfloat16, weights of deviation 2e-02: error of 8 bits 1%, 4 bits 9%
bfloat16, weights of deviation 1e-03: error of 8 bits 1%, 4 bits 9%
bfloat16, weights of deviation 1e-04: error of 8 bits 14%, 4 bits 14%
bfloat16, weights of deviation 1e-05: error of 8 bits 99%, 4 bits 99%
float16, weights of deviation 2e-02: error of 8 bits 1%, 4 bits 9%
float16, weights of deviation 1e-03: error of 8 bits 1%, 4 bits 9%
float16, weights of deviation 1e-04: error of 8 bits 14%, 4 bits 14%
float16, weights of deviation 1e-05: error of 8 bits 99%, 4 bits 99%
EXPECTED
