#!/bin/bash
# On a CPU, torch's norm of a large FP32 tensor is too small: 1.1 % at 1e8 elements, 7 % at 4e8; its L1 norm is a fifth of what is right.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64, at 1 to 8 threads. Each of 16 sums of squares is one FP32 number, and adds nothing more once the
# next square is below half a unit of its last place; torch.sum of the same squares is right to 1e-7. It is torch.linalg.vector_norm,
# Tensor.norm and torch.dist (torch.dot loses 0.8 % at 1e8 on one thread, less on more), and so clip_grad_norm_, of gradients in host memory: an
# embedding of 128,256 x 4,096, 5e8 elements, is clipped a tenth too little. BF16 and FP16 tensors are the same. Nothing is reported. Right: dtype=torch.float64, or norms of parts;
# `msamp.clip_grad_norm_` adds exactly.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, 4 GB of memory, and gigabytes where pip has no torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > norms.py <<'PROGRAM'
import torch


def share(got: torch.Tensor, want: float) -> str:
    return f"{got.item() / want:.3f}"


torch.manual_seed(0)
x = torch.randn(400_000_000)
for count in (1_000_000, 100_000_000, 400_000_000):
    part = x[:count]
    pieces = torch.stack([torch.linalg.vector_norm(piece) for piece in part.split(100_000)])
    l2, l1 = torch.linalg.vector_norm(pieces).item(), sum(piece.abs().sum().item() for piece in part.split(100_000))
    print(f"{count:.0e} normal numbers: L2 norm {share(torch.linalg.vector_norm(part), l2)}", end=" ")
    print(f"and L1 norm {share(torch.linalg.vector_norm(part, 1), l1)} of the right one", flush=True)
weight = torch.nn.Parameter(torch.zeros(0))
weight.data, weight.grad = x, x
norm = torch.nn.utils.clip_grad_norm_([weight], l2 / 2, foreach=False)  # scales x in place
left = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece) for piece in x.split(100_000)])).item()
print(f"clip_grad_norm_ to 0.5 of the norm: it returns {share(norm, l2)} of it and leaves {left / l2:.2f}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore norms.py | tee seen
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
1e+06 normal numbers: L2 norm 1.000 and L1 norm 1.000 of the right one
1e+08 normal numbers: L2 norm 0.989 and L1 norm 0.540 of the right one
4e+08 normal numbers: L2 norm 0.927 and L1 norm 0.211 of the right one
clip_grad_norm_ to 0.5 of the norm: it returns 0.927 of it and leaves 0.54
EXPECTED
