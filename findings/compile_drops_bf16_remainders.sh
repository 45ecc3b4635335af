#!/bin/bash
# torch.compile removes a cast to BF16 or FP16 that is cast back: `x - x.bfloat16().float()` is 0, and compiled Kahan sums lose what they keep.
#
# Seen with torch 2.13.0, backend inductor (the default), on a CPU, Linux x86-64. The remainder of a rounding is how BF16 weights without FP32
# copies train: Kahan summation, Collage, error feedback, a split into two BF16. Compiled, it is computed from the number that was not rounded,
# and is 0, without a message: 1,000 steps of -1e-4 from 1 end at 0.902 in eager mode, and at 1 compiled. A function written in BF16 alone, as
# in papers, loses it too. A cast to FP8 and back is kept. Right: torch._inductor.config.emulate_precision_casts = True, which is not the default,
# or to keep such code out of compiled regions, as `msamp.initialize`'s optimizers do by themselves (torch._disable_dynamo).
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a C++ compiler and a minute, and gigabytes where pip has no torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > remainders.py <<'PROGRAM'
from collections.abc import Callable

import torch
from torch import Tensor
from torch._inductor import config


def remainder(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x - x.to(dtype).float()


def kahan_fp32(weight: Tensor, lost: Tensor, update: float) -> tuple[Tensor, Tensor]:
    y = lost.float() + update
    new = (weight.float() + y).bfloat16()
    return new, (y - (new.float() - weight.float())).bfloat16()


def kahan_bf16(weight: Tensor, lost: Tensor, update: float) -> tuple[Tensor, Tensor]:
    y = lost + update
    new = weight + y
    return new, y - (new - weight)


def show(how: str, wrap: Callable[[Callable], Callable]) -> None:
    torch.compiler.reset()
    x = torch.linspace(-3, 3, 64)
    sizes = (f"{str(dtype)[6:]} {wrap(remainder)(x, dtype).abs().max():.1g}" for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn))
    print(f"{how}: largest remainder of a cast to", ", ".join(sizes), flush=True)
    for function in (kahan_fp32, kahan_bf16):
        step, weight, lost = wrap(function), torch.ones(64).bfloat16(), torch.zeros(64).bfloat16()
        for _ in range(1000):
            weight, lost = step(weight, lost, -1e-4)
        print(f"{how}: {function.__name__}, 1 - 1,000 x 1e-4 = {weight[0].item():.3f}", flush=True)


show("eager", lambda function: function)
show("compiled", torch.compile)
config.emulate_precision_casts = True
show("emulate_precision_casts", torch.compile)
PROGRAM
TORCHINDUCTOR_CACHE_DIR="$folder/cache" OMP_NUM_THREADS=1 venv/bin/python remainders.py | tee seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
eager: largest remainder of a cast to bfloat16 0.007, float16 0.0009, float8_e4m3fn 0.1
eager: kahan_fp32, 1 - 1,000 x 1e-4 = 0.902
eager: kahan_bf16, 1 - 1,000 x 1e-4 = 0.902
compiled: largest remainder of a cast to bfloat16 0, float16 0, float8_e4m3fn 0.1
compiled: kahan_fp32, 1 - 1,000 x 1e-4 = 1.000
compiled: kahan_bf16, 1 - 1,000 x 1e-4 = 1.000
emulate_precision_casts: largest remainder of a cast to bfloat16 0.007, float16 0.0009, float8_e4m3fn 0.1
emulate_precision_casts: kahan_fp32, 1 - 1,000 x 1e-4 = 0.902
emulate_precision_casts: kahan_bf16, 1 - 1,000 x 1e-4 = 0.902
EXPECTED
