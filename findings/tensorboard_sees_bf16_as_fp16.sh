#!/bin/bash
# torch's SummaryWriter casts BF16 tensors to FP16: a histogram of gradients below 3e-8 shows zeros, and a scalar above 65,504 is infinite.
#
# Seen with torch 2.13.0 and tensorboard 2.21.0 on a CPU, Linux x86-64. NumPy has no BF16, and torch.utils.tensorboard takes FP16 in its place,
# which has neither the range below nor above; add_scalar and add_histogram share that cast. Gradients of a BF16 model are often 1e-9 (a mean over
# many tokens), and their histogram is one bar at 0, as of a layer that is cut off. A loss scale or an amax of 131,072 becomes infinite. Nothing is
# reported. Right: `.float()` first; `megatron/lm` writes Python floats.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6 tensorboard==2.21.0
cat > written.py <<'PROGRAM'
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(0)
gradient, scale = torch.randn(10_000) * 1e-9, torch.tensor(131072.0)
for dtype in (torch.float32, torch.bfloat16):
    name = str(dtype)[6:]
    with SummaryWriter(name) as writer:
        writer.add_histogram("gradient", gradient.to(dtype), 0)
        writer.add_scalar("scale", scale.to(dtype), 0)
        writer.add_scalar("norm", gradient.to(dtype).abs().max(), 0)
    events = EventAccumulator(name, size_guidance={"histograms": 0})
    events.Reload()
    seen = events.Histograms("gradient")[0].histogram_value
    print(f"{name}: histogram from {seen.min:.1e} to {seen.max:.1e}, scale {events.Scalars('scale')[0].value}", end=", ")
    print(f"largest gradient {events.Scalars('norm')[0].value:.1e}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore written.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32: histogram from -4.3e-09 to 4.1e-09, scale 131072.0, largest gradient 4.3e-09
bfloat16: histogram from -0.0e+00 to -0.0e+00, scale inf, largest gradient 0.0e+00
EXPECTED
