#!/bin/bash
# torch.optim.AdamW of BF16 parameters never forgets a large gradient: its second moment does not fall, and the weight's steps stay small for good.
#
# Seen with torch 2.13.0 on a CPU, Linux x86-64, betas at their defaults, in the loop, foreach and fused forms. The states of BF16 parameters are
# BF16, and v times 0.999 is v again there: half a unit of its last place is 0.2 to 0.4 %. After one gradient of 16, gradients of 0.01 still move
# the weight by a fiftieth of the learning rate 10,000 steps later; with FP32 parameters the gradient is forgotten by then. For the same reason v of
# gradients that are all 0.5 ends at half of 0.25 or less (too large steps), and of normal ones at 1.6 to 2.1 in place of 1. FP16 forgets.
# transformers 5 loads files in their own dtype, BF16 for most, so that its Trainer updates such weights like this. `msamp` keeps FP32 or scaled FP8
# and FP16 moments. Collage's authors name beta2 in BF16; torch's documentation does not.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" numpy==2.4.6
cat > moments.py <<'PROGRAM'
import torch


def after(gradients: list[tuple[float, int]], dtype: torch.dtype, **how: bool) -> tuple[float, float]:
    """Second moment, and size of the last step in learning rates."""
    weight = torch.nn.Parameter(torch.zeros(32, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, **how)
    for value, steps in gradients:
        weight.grad = torch.full((32,), value, dtype=dtype)
        for _ in range(steps):
            optimizer.step()
    state = optimizer.state[weight]
    return state["exp_avg_sq"][0].item(), float(state["exp_avg"][0].float() / state["exp_avg_sq"][0].float().sqrt())


for dtype in (torch.float32, torch.bfloat16):
    for how in ("loop", "foreach", "fused"):
        options = {"foreach": False} if how == "loop" else {how: True}
        v, step = after([(16.0, 1), (0.01, 10_000)], dtype, **options)
        constant, _ = after([(0.5, 5_000)], dtype, **options)
        name = f"{str(dtype)[6:]}, {how}"
        print(f"{name}: v {v:.2g} and steps of {step:.2f} lr, 10,000 gradients of 0.01 after one of 16; v of 0.5 is {constant:.3f}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore moments.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32, loop: v 0.00011 and steps of 0.95 lr, 10,000 gradients of 0.01 after one of 16; v of 0.5 is 0.248
float32, foreach: v 0.00011 and steps of 0.95 lr, 10,000 gradients of 0.01 after one of 16; v of 0.5 is 0.248
float32, fused: v 0.00011 and steps of 0.95 lr, 10,000 gradients of 0.01 after one of 16; v of 0.5 is 0.248
bfloat16, loop: v 0.26 and steps of 0.02 lr, 10,000 gradients of 0.01 after one of 16; v of 0.5 is 0.125
bfloat16, foreach: v 0.26 and steps of 0.02 lr, 10,000 gradients of 0.01 after one of 16; v of 0.5 is 0.125
bfloat16, fused: v 0.26 and steps of 0.02 lr, 10,000 gradients of 0.01 after one of 16; v of 0.5 is 0.062
EXPECTED
